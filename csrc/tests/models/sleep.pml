/* How a waiter goes to sleep and a publisher wakes it: signal.h and wait.cpp.  The kernel's futex
 * compares the word with the value the waiter saw and sleeps in one step.  Sleeping has no time limit
 * here, so a lost wake-up is a deadlock (the real wait looks again after 20 ms).
 *
 * Mutants, each of which must be found:
 *   -DWAKE_EARLY   the publisher looks for waiters before it stores
 *   -DNO_COMPARE   the kernel does not compare before it sleeps
 */
#ifndef WAITERS
#define WAITERS 2
#endif
#define EPOCHS 2

byte value = 0;
byte waiters = 0;
byte asleep = 0;   /* sleeping now */
byte generation = 0; /* of wake-ups */
byte finished = 0;

proctype waiter() {
  byte expected, seen, slept_in;
  expected = 1;
  do
  :: expected > EPOCHS -> break
  :: else ->
    do
    :: value >= expected -> break
    :: else ->
      waiters++;
      seen = value;
      if
      :: seen >= expected -> skip
      :: else ->
        atomic {
#ifdef NO_COMPARE
          slept_in = generation; asleep++;
#else
          if
          :: value == seen -> slept_in = generation; asleep++
          :: else -> goto awake
          fi;
#endif
        }
        atomic { generation != slept_in -> asleep-- }
      fi;
awake:
      waiters--
    od;
    expected++
  od;
  finished++
}

active proctype publisher() {
  byte epoch, count;
  epoch = 1;
  do
  :: epoch > EPOCHS -> break
  :: else ->
#ifdef WAKE_EARLY
    count = waiters;
    value = epoch;
#else
    value = epoch;
    count = waiters;
#endif
    if
    :: count > 0 -> generation++   /* FUTEX_WAKE of all */
    :: else -> skip
    fi;
    epoch++
  od;
  finished == WAITERS
}

init {
  byte i;
  atomic {
    i = 0;
    do
    :: i == WAITERS -> break
    :: else -> run waiter(); i++
    od
  }
}
