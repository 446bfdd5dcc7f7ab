// What goes wrong between ranks, as opposed to a wrong call (std::logic_error and its kind).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tpk {

enum class FaultKind { timeout, peer_lost, mismatch, closed };

inline const char* name(FaultKind kind) {
  switch (kind) {
    case FaultKind::timeout: return "timeout";
    case FaultKind::peer_lost: return "peer_lost";
    case FaultKind::mismatch: return "mismatch";
    case FaultKind::closed: return "closed";
  }
  return "unknown";
}

class Fault : public std::runtime_error {
 public:
  Fault(FaultKind kind, int peer, int slot, std::string op, std::uint32_t expected,
        std::uint32_t seen, std::string detail)
      : std::runtime_error(op + " (slot " + std::to_string(slot) + ", rank " +
                           std::to_string(peer) + ", expected " + std::to_string(expected) +
                           ", seen " + std::to_string(seen) + "): " + detail),
        kind(kind), peer(peer), slot(slot), op(std::move(op)), expected(expected), seen(seen),
        detail(std::move(detail)) {}

  FaultKind kind;
  int peer;  // whom this rank waited for
  int slot;  // -1: a ring, or the group as a whole
  std::string op;
  std::uint32_t expected;
  std::uint32_t seen;
  std::string detail;
};

// A failed system call, with the errno that Python's OSError carries.
class SystemError : public std::runtime_error {
 public:
  SystemError(int code, const std::string& message, std::string path)
      : std::runtime_error(message + ": " + path), code(code), message(message),
        path(std::move(path)) {}

  int code;
  std::string message;
  std::string path;
};

}  // namespace tpk
