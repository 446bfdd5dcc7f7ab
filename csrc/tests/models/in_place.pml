/* Rounds on memory that nobody copies (SymmetricTensor): the caller writes its buffer whenever no call
 * is running.  Odd rounds reduce in place, even rounds read and settle; see Slot::reduce_in_place and
 * Slot::settle in csrc/host/slot.cpp.  One buffer a rank, cut into a part for every rank.
 *
 *   -DRANKS=2|3  -DROUNDS=4   sizes
 * Mutants, each of which must be found:
 *   -DNO_FIRST_WAIT   parts are summed without waiting for the peer's ready
 *   -DEARLY_REDUCED   reduced is raised before the sums are written
 *   -DNO_SECOND_WAIT  the call returns without waiting for the peers' sums
 *   -DNO_SETTLE       the call returns while peers may still read
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 4
#endif
#define MOD 8
#define START 6
#define EPOCH(round) ((START + (round)) % MOD)
#define REACHED(seen, expected) ((((seen) - (expected) + MOD) % MOD) < MOD / 2)
#define PART(rank, owner) ((rank) * RANKS + (owner))
#define SUM(round) (100 + (round))

byte ready[RANKS] = START;
byte reduced[RANKS] = START;
byte credit[RANKS] = START;
byte data[RANKS * RANKS];
byte finished_ranks = 0;

#define EACH(step) i = 0; do :: i == RANKS -> break :: else -> step; i++ od
#define WAIT_FOR(counter) if :: i == me -> skip :: else -> REACHED(counter[i], EPOCH(round)) fi

proctype rank(byte me) {
  byte round = 1, i;
  do
  :: round > ROUNDS -> break
  :: else ->
    EACH(data[PART(me, i)] = round);  /* by the caller */
    EACH(if :: i == me -> skip :: else -> REACHED(credit[i], EPOCH(round - 1)) fi);
    ready[me] = EPOCH(round);
#ifndef NO_FIRST_WAIT
    EACH(WAIT_FOR(ready));
#endif
    EACH(assert(data[PART(i, me)] == round));
    if
    :: round % 2 == 1 ->
#ifdef EARLY_REDUCED
      reduced[me] = EPOCH(round);
#endif
      EACH(data[PART(i, me)] = SUM(round));
#ifndef EARLY_REDUCED
      reduced[me] = EPOCH(round);
#endif
#ifndef NO_SECOND_WAIT
      EACH(WAIT_FOR(reduced));
#endif
      EACH(assert(data[PART(me, i)] == SUM(round)));
      credit[me] = EPOCH(round)
    :: else ->
      credit[me] = EPOCH(round);
#ifndef NO_SETTLE
      EACH(WAIT_FOR(credit));
#endif
      skip
    fi;
    round++
  od;
  finished_ranks++
}

init {
  byte i;
  atomic {
    i = 0;
    do
    :: i == RANKS -> break
    :: else -> run rank(i); i++
    od
  }
  finished_ranks == RANKS  /* otherwise an invalid end state: a deadlock */
}
