// How long a wait tries before it sleeps, and which ranks need each other's cores.
#include "domain.h"  // and with it the wait.h of the host: that of the devices has the same name

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

#include "check.h"
#include "process.h"

namespace tpk {
namespace {

// A wait whose condition holds when it is looked at for the `looks`th time; what the policy is then.
int spins_after(WaitPolicy policy, int looks) {
  Signal bell{};
  int looked = 0;
  CHECK(wait_for_bell(bell, [&](Look) { return ++looked >= looks; }, deadline_after(10), policy, [] {}));
  return policy.spins;
}

// A yield lasts as long as other programs want, and then the wait is one that slept. So some are tried.
bool happens(WaitPolicy policy, int looks, int spins) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    if (spins_after(policy, looks) == spins) return true;
  }
  return false;
}

void spins_follow_the_peer() {
  const WaitPolicy free = WaitPolicy::of(false), crowded = WaitPolicy::of(true);
  CHECK(crowded.max_spins < free.max_spins);
  const WaitPolicy policy{40, 2000};
  CHECK_EQUAL(spins_after(policy, 40), 80);      // in time
  CHECK(happens(policy, 42, 20));                // with the first yield: the peer needed this core
  CHECK(!happens(policy, 42, 80));
  CHECK(happens(policy, 43, 80));                // a little late, on a core of its own
  const WaitPolicy least{20, 20};
  CHECK_EQUAL(spins_after(least, 1), 20);        // no more than is allowed
  WaitPolicy late = free;
  Signal never{};
  for (int i = 0; i < 20; ++i) {
    CHECK(!wait_until(never, 1, deadline_after(1e-4), late, [] {}));
  }
  CHECK_EQUAL(late.spins, crowded.max_spins);
}

// A process that sleeps on these cores.
class Child {
 public:
  explicit Child(const std::vector<int>& cores) : pid_(::fork()) {
    CHECK(pid_ >= 0);
    if (pid_ == 0) {
      while (true) ::pause();
    }
    pin(pid_, cores);
  }
  ~Child() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  static void pin(pid_t pid, const std::vector<int>& cores) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : cores) CPU_SET(core, &set);
    CHECK_EQUAL(::sched_setaffinity(pid, sizeof(set), &set), 0);
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
};

void cores_are_counted() {
  cpu_set_t set;
  CPU_ZERO(&set);
  CHECK_EQUAL(::sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  const pid_t own = ::getpid();
  const int a = cores.front(), b = cores.back();  // the same on a machine with one
  const auto share = [](auto... processes) { return share_cores({processes...}); };
  CHECK(!share(own));
  CHECK(share_cores(std::vector<pid_t>(cores.size() + 1, own)));  // threads that are ranks
  {
    const Child first({a}), second({b}), wide(cores);
    Child::pin(own, {a});
    CHECK(share(own, first.pid()));
    CHECK(share(own, first.pid(), wide.pid()));
    CHECK_EQUAL(share(own, second.pid()), a == b);
    CHECK(share(own, first.pid(), second.pid()));
    Child::pin(own, {a, b});
    CHECK_EQUAL(share(own, first.pid()), a == b);
    CHECK(share(own, first.pid(), second.pid()));
  }
  CHECK(!share(own, 0x7ffffff0));  // a process that has ended
  Child::pin(own, cores);
}

}  // namespace
}  // namespace tpk

int main() {
  tpk::spins_follow_the_peer();
  tpk::cores_are_counted();
}
