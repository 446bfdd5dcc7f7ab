#include "slot.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "streaming.h"

namespace tpk {
namespace {

constexpr std::uint32_t kReducedStride = 1 << 20;

// Sums are copied to the peers while they are in the nearest cache.
constexpr std::uint64_t kInPlaceBytes = 16 << 10;

std::string to_text(const Descriptor& descriptor) {
  std::string text = "op " + std::to_string(descriptor.op) + " dtype " +
                     std::to_string(descriptor.dtype) + " d (";
  for (int i = 0; i < 3; ++i) text += (i ? ", " : "") + std::to_string(descriptor.d[i]);
  return text + ")";
}

bool same(const Descriptor& a, const Descriptor& b) {
  return a.op == b.op && a.dtype == b.dtype && std::equal(a.d, a.d + 3, b.d);
}

}  // namespace

std::uint64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32: return 4;
    case Dtype::bfloat16: return 2;
    case Dtype::float16: return 2;
    case Dtype::uint8: return 1;
    case Dtype::int64: return 8;
  }
  throw std::invalid_argument("dtype code " + std::to_string(static_cast<std::uint32_t>(dtype)) +
                              " is not known");
}

bool is_reducible(Dtype dtype) { return static_cast<std::uint32_t>(dtype) < kReducibleDtypes; }

Slot::Slot(std::shared_ptr<Domain> domain, int index)
    : domain_(std::move(domain)), index_(index), fill_policy_(domain_->wait_policy()),
      read_policy_(fill_policy_) {
  domain_->check_process();
  domain_->claim(index);
  const std::uint32_t round = observe(signals(rank()).ready);
  published_ = finished_ = round;
  seen_.assign(world(), round);
  credit_.assign(world(), round);
  sources_.resize(world());
  own_.resize(buffers());
}

Signals& Slot::signals(int rank) const {
  return domain_->layout().signals(domain_->base(), index_, rank);
}

Descriptor& Slot::descriptor(int rank, std::uint32_t index) const {
  return domain_->layout().descriptor(domain_->base(), index_, rank, index);
}

std::byte* Slot::buffer(int rank, std::uint32_t index) const {
  if (rank < 0 || rank >= world() || index >= buffers()) {
    throw std::invalid_argument("there is no buffer " + std::to_string(index) + " of rank " +
                                std::to_string(rank));
  }
  return domain_->layout().buffer(domain_->base(), index_, rank, index);
}

std::uint32_t Slot::round_buffer() const {
  if (published_ == finished_) throw std::logic_error("no round of this slot is published");
  return read_buffer_;
}

std::uint32_t Slot::await(Signal& signal, std::uint32_t expected, int peer, double timeout,
                          WaitPolicy& policy, const char* what) {
  return domain_->await(signal, expected, timeout, policy, WaitFor{index_, op_, peer, what});
}

std::uint32_t Slot::begin(double timeout) {
  if (begun_) throw std::logic_error("begin: publish the round that was begun first");
  if (open_rounds() >= buffers()) {
    throw std::logic_error("begin: all " + std::to_string(buffers()) +
                           " buffers hold rounds that this rank has not finished");
  }
  const std::uint32_t needed = credit_for(published_ + 1, buffers());
  for (int peer = 0; peer < world(); ++peer) {
    // A look at the peer's signal takes its cache line away: only where the last look is too old.
    if (peer == rank() || reached(credit_[peer], needed)) continue;
    credit_[peer] = await(signals(peer).done, needed, peer, timeout, fill_policy_,
                          "finish its round");
  }
  begun_ = true;
  own_[fill_buffer_] = 0;
  return fill_buffer_;
}

void Slot::fill(const void* source, std::uint64_t count, Dtype dtype, std::uint64_t kept,
                std::uint64_t kept_end) {
  if (!begun_) throw std::logic_error("fill: no round was begun");
  check_range(0, count, dtype);
  if (kept > kept_end || kept_end > count) throw std::invalid_argument("fill: wrong range");
  const std::uint64_t size = size_of(dtype);
  const auto* from = static_cast<const std::byte*>(source);
  std::byte* to = buffer(rank(), fill_buffer_);
  copy_bytes(to, from, kept * size);
  copy_bytes(to + kept_end * size, from + kept_end * size, (count - kept_end) * size);
  read_own_at(source, 0, dtype);
}

void Slot::read_own_at(const void* source, std::uint64_t index, Dtype dtype) {
  if (!begun_) throw std::logic_error("read_own_at: no round was begun");
  own_[fill_buffer_] = reinterpret_cast<std::uintptr_t>(source) - index * size_of(dtype);
}

void Slot::fill_summands(const void* source, std::uint64_t count, Dtype dtype, Shots shots) {
  std::uint64_t kept = 0, kept_end = 0;
  if (takes_two_shots(count * size_of(dtype), true, shots)) {
    kept = part_start(rank(), count, dtype);
    kept_end = part_start(rank() + 1, count, dtype);
  }
  fill(source, count, dtype, kept, kept_end);
}

bool Slot::takes_two_shots(std::uint64_t bytes, bool filled, Shots shots) const {
  if (shots != Shots::automatic) return shots == Shots::two;
  const Tuning& tuning = domain_->tuning();
  return bytes >= (filled ? tuning.two_shot : tuning.two_shot_resident);
}

void Slot::publish(const Descriptor& descriptor) {
  if (!begun_) throw std::logic_error("publish: no round was begun");
  this->descriptor(rank(), fill_buffer_) = descriptor;
  raise(signals(rank()).ready, ++published_);
  fill_buffer_ = (fill_buffer_ + 1) % buffers();
  begun_ = false;
}

void Slot::compare_descriptors(int peer) const {
  const Descriptor& mine = descriptor(rank(), read_buffer_);
  const Descriptor& theirs = descriptor(peer, read_buffer_);
  if (same(mine, theirs)) return;
  throw Fault(FaultKind::mismatch, peer, index_, op_.load(), finished_ + 1, observe(signals(peer).ready),
              "rank " + std::to_string(rank()) + " has " + to_text(mine) + ", rank " +
                  std::to_string(peer) + " has " + to_text(theirs));
}

void Slot::wait(int peer, double timeout) {
  if (peer < 0 || peer >= world()) {
    throw std::invalid_argument("wait: there is no rank " + std::to_string(peer));
  }
  if (published_ == finished_) throw std::logic_error("wait: publish a round first");
  const std::uint32_t round = finished_ + 1;
  if (peer == rank() || seen_[peer] == round) return;
  await(signals(peer).ready, round, peer, timeout, read_policy_, "publish its round");
  compare_descriptors(peer);
  seen_[peer] = round;
}

void Slot::wait_all(double timeout) {
  for (int peer = 0; peer < world(); ++peer) wait(peer, timeout);
}

std::size_t Slot::wait_any(const std::vector<int>& peers, double timeout) {
  const std::uint32_t round = finished_ + 1;
  for (int spin = 0; spin < read_policy_.spins; ++spin) {
    for (std::size_t i = 0; i < peers.size(); ++i) {
      if (peers[i] < 0 || peers[i] >= world()) break;  // `wait` says what is wrong
      if (reached(observe(signals(peers[i]).ready), round)) {
        wait(peers[i], timeout);
        return i;
      }
    }
  }
  // All of them are late. A thread can sleep on one signal only, and any of them will do.
  wait(peers.at(0), timeout);
  return 0;
}

void Slot::finish() {
  if (published_ == finished_) throw std::logic_error("finish: no round is published");
  const std::uint32_t round = ++finished_;
  // Rounds without a second shot leave it behind, but never by half a wrap.
  if (round % kReducedStride == 0) raise(signals(rank()).reduced, round);
  raise(signals(rank()).done, round);
  read_buffer_ = (read_buffer_ + 1) % buffers();
}

void Slot::settle(double timeout) {
  for (int peer = 0; peer < world(); ++peer) {
    if (peer == rank()) continue;
    credit_[peer] = await(signals(peer).done, finished_, peer, timeout, fill_policy_,
                          "finish its round");
  }
}

void Slot::check_range(std::uint64_t offset, std::uint64_t count, Dtype dtype) const {
  if (!is_reducible(dtype)) throw std::invalid_argument("this dtype cannot be reduced");
  const std::uint64_t elements = capacity() / size_of(dtype);
  if (offset > elements || count > elements - offset) {
    throw std::invalid_argument("elements " + std::to_string(offset) + " + " +
                                std::to_string(count) + " are not all in a buffer of " +
                                std::to_string(elements));
  }
}

void Slot::sum(void* out, std::uint64_t first, std::uint64_t count, Dtype dtype, Bias bias) {
  const ReduceFunction reduce = domain_->isa().reduce[static_cast<std::uint32_t>(dtype)];
  const std::uint64_t size = size_of(dtype);
  const std::uintptr_t own = own_[read_buffer_];
  const auto run = [&](std::uint64_t done, std::uint64_t length, const void* row) {
    const std::uint64_t offset = (first + done) * size;
    for (int peer = 0; peer < world(); ++peer) sources_[peer] = buffer(peer, read_buffer_) + offset;
    if (own != 0) sources_[rank()] = reinterpret_cast<const void*>(own + offset);
    reduce(sources_.data(), sources_.size(), row, static_cast<std::byte*>(out) + done * size,
           length);
  };
  if (bias.data == nullptr) return run(0, count, nullptr);
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t column = (bias.first + first + done) % bias.period;
    const std::uint64_t length = std::min(count - done, bias.period - column);
    run(done, length, static_cast<const std::byte*>(bias.data) + column * size);
    done += length;
  }
}

void Slot::reduce(void* out, std::uint64_t offset, std::uint64_t count, Dtype dtype, Bias bias,
                  double timeout) {
  check_range(offset, count, dtype);
  wait_all(timeout);
  sum(out, offset, count, dtype, bias);
}

std::uint64_t Slot::part_start(int owner, std::uint64_t count, Dtype dtype) const {
  const std::uint64_t line = 64 / size_of(dtype);
  const std::uint64_t part = ((count + world() - 1) / world() + line - 1) / line * line;
  return std::min(count, part * owner);
}

void Slot::reduce_all(const Reduction& reduction, double timeout) {
  const auto& [out, count, dtype, bias, shots, streaming] = reduction;
  check_range(0, count, dtype);
  const std::uint64_t size = size_of(dtype);
  wait_all(timeout);
  if (!takes_two_shots(count * size, own_[read_buffer_] != 0, shots)) {
    return sum(out, 0, count, dtype, bias);
  }

  // Only this rank reads its own part of its own buffer, so the sums can take its place.
  const std::uint32_t round = finished_ + 1;
  const std::uint64_t first = part_start(rank(), count, dtype);
  sum(buffer(rank(), read_buffer_) + first * size, first,
      part_start(rank() + 1, count, dtype) - first, dtype, bias);
  raise(signals(rank()).reduced, round);
  for (int step = 0; step < world(); ++step) {
    const int owner = (rank() + step) % world();
    const std::uint64_t from = part_start(owner, count, dtype);
    if (owner != rank()) {
      await(signals(owner).reduced, round, owner, timeout, read_policy_, "reduce its part");
    }
    const std::uint64_t length = (part_start(owner + 1, count, dtype) - from) * size;
    copy_bytes(static_cast<std::byte*>(out) + from * size,
               buffer(owner, read_buffer_) + from * size, length, streaming);
  }
}

void Slot::reduce_in_place(std::uint64_t count, Dtype dtype, double timeout) {
  check_range(0, count, dtype);
  wait_all(timeout);
  const std::uint64_t size = size_of(dtype);
  const std::uint32_t round = finished_ + 1;
  const std::uint64_t end = part_start(rank() + 1, count, dtype);
  // Of all buffers, only this rank reads and writes this part.
  for (std::uint64_t from = part_start(rank(), count, dtype); from < end;) {
    const std::uint64_t length = std::min(kInPlaceBytes / size, end - from);
    const std::byte* sums = buffer(rank(), read_buffer_) + from * size;
    sum(buffer(rank(), read_buffer_) + from * size, from, length, dtype, {});
    for (int step = 1; step < world(); ++step) {
      const int peer = (rank() + step) % world();
      std::memcpy(buffer(peer, read_buffer_) + from * size, sums, length * size);
    }
    from += length;
  }
  raise(signals(rank()).reduced, round);
  for (int peer = 0; peer < world(); ++peer) {
    if (peer != rank()) {
      await(signals(peer).reduced, round, peer, timeout, read_policy_, "reduce its part");
    }
  }
}

}  // namespace tpk
