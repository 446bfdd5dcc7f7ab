/* The rounds of a slot as csrc/host/slot.cpp runs them: begin (credit), fill, publish, read, finish,
 * and the second shot of a two-shot reduction.  Memory is sequentially consistent here: what orders
 * the plain stores is release and acquire (signal.h), which ThreadSanitizer checks on the real code.
 *
 * Counters wrap at MOD and start just below it.  `data` holds the round that filled a buffer, `part`
 * the round whose reduced part replaced it.  A rank that reads anything but its own round has seen
 * stale data or data of the future.
 *
 *   -DRANKS=2|3  -DROUNDS=3  -DBUFFERS=2   sizes
 * Mutants, each of which must be found:
 *   -DNO_CREDIT      begin does not wait for the peers' credit
 *   -DEARLY_PUBLISH  ready is raised before the buffer is filled
 *   -DEARLY_FINISH   credit is given before the last read
 *   -DNO_SECOND_WAIT parts are copied without waiting for the peer's reduced
 *   -DPLAIN_COMPARE  counters are compared without wrap-around
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef ROUNDS
#define ROUNDS 3
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif
#define MOD 8
#define START 6
#define EPOCH(round) ((START + (round)) % MOD)
#ifdef PLAIN_COMPARE
#define REACHED(seen, expected) ((seen) >= (expected))
#else
#define REACHED(seen, expected) ((((seen) - (expected) + MOD) % MOD) < MOD / 2)
#endif
#define CELL(rank, index) ((rank) * BUFFERS + (index))

byte ready[RANKS] = START;
byte reduced[RANKS] = START;
byte credit[RANKS] = START;
byte data[RANKS * BUFFERS];
byte part[RANKS * BUFFERS];
byte finished_ranks = 0;

proctype rank(byte me) {
  byte produced = 0, consumed = 0, round, peer, index;
  do
  :: consumed == ROUNDS -> break

  /* as many rounds ahead as there are buffers: begin, fill, publish */
  :: produced < ROUNDS && produced - consumed < BUFFERS ->
    round = produced + 1;
    index = round % BUFFERS;
    peer = 0;
    do
    :: peer == RANKS -> break
    :: else ->
#ifndef NO_CREDIT
      if
      :: peer == me || round <= BUFFERS -> skip
      :: else -> REACHED(credit[peer], EPOCH(round - BUFFERS))
      fi;
#endif
      peer++
    od;
#ifdef EARLY_PUBLISH
    ready[me] = EPOCH(round);
#endif
    part[CELL(me, index)] = 0;  /* one memory: filling overwrites the part */
    data[CELL(me, index)] = round;
#ifndef EARLY_PUBLISH
    ready[me] = EPOCH(round);
#endif
    produced = round

  /* the oldest round: read, finish */
  :: consumed < produced ->
    round = consumed + 1;
    index = round % BUFFERS;
    peer = 0;
    do
    :: peer == RANKS -> break
    :: else ->
      if
      :: peer == me -> skip
      :: else -> REACHED(ready[peer], EPOCH(round))
      fi;
      assert(data[CELL(peer, index)] == round);
      peer++
    od;
#ifdef EARLY_FINISH
    credit[me] = EPOCH(round);
#endif
    part[CELL(me, index)] = round;
    reduced[me] = EPOCH(round);
    peer = 0;
    do
    :: peer == RANKS -> break
    :: else ->
#ifndef NO_SECOND_WAIT
      if
      :: peer == me -> skip
      :: else -> REACHED(reduced[peer], EPOCH(round))
      fi;
#endif
      assert(part[CELL(peer, index)] == round);
      peer++
    od;
#ifndef EARLY_FINISH
    credit[me] = EPOCH(round);
#endif
    consumed = round
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
