/* Messages through a ring as csrc/host/ring.cpp moves them: wait for credit, fill a cell, publish it;
 * observe, read, give credit.  Memory is sequentially consistent here, as in round.pml.
 *
 * Counters wrap at MOD, which the number of cells does not divide, and start just below it.  Messages
 * have any of the lengths 0..LONGEST in cells; an empty one takes a cell for its header too.  A cell is
 * written and read in two steps, a header and a word of payload, so that a reader which is overtaken
 * sees parts of two messages.  Both ends look at the peer's counter only where the last look is too
 * old (`seen`).
 *
 *   -DCELLS=3  -DMESSAGES=4  -DLONGEST=4   sizes
 * Mutants, each of which must be found:
 *   -DNO_CREDIT       the sender does not wait for credit
 *   -DEXTRA_CREDIT    it waits for the credit of one cell too few
 *   -DEARLY_PUBLISH   a cell is published before it is filled
 *   -DEARLY_CREDIT    credit is given before the cell is read
 *   -DCREDIT_AT_END   credit is given when a message is over, not cell by cell
 *   -DNO_EMPTY_CREDIT an empty message gives no credit
 *   -DEQUAL_COMPARE   the sender waits for one value of the counter, not for that or more
 *   -DPLAIN_COMPARE   counters are compared without wrap-around
 *   -DCELL_BY_COUNT   the cell is the counter modulo the number of cells
 */
#ifndef CELLS
#define CELLS 3
#endif
#ifndef MESSAGES
#define MESSAGES 4
#endif
#ifndef LONGEST
#define LONGEST 4
#endif
#define MOD 8
#define START 6
#define NEXT(count) (((count) + 1) % MOD)
#define BEHIND(count) (((count) + MOD - CELLS) % MOD)
#ifdef PLAIN_COMPARE
#define REACHED(seen, expected) ((seen) >= (expected))
#else
#define REACHED(seen, expected) ((((seen) - (expected) + MOD) % MOD) < MOD / 2)
#endif
#ifdef EQUAL_COMPARE
#define HAS_CREDIT(seen, expected) ((seen) == (expected))
#else
#define HAS_CREDIT(seen, expected) REACHED(seen, expected)
#endif
#ifdef EXTRA_CREDIT
#define NEEDED(count) BEHIND(count)
#else
#define NEEDED(count) NEXT(BEHIND(count))
#endif
#ifdef CELL_BY_COUNT
#define ADVANCE(cell, count) cell = (count) % CELLS
#else
#define ADVANCE(cell, count) cell = (cell + 1) % CELLS
#endif

byte sent = START;
byte received = START;
byte length[CELLS];   /* of the message, as the header in its first cell says */
byte word[CELLS];     /* payload: which cell of the whole stream this is */
byte lengths[MESSAGES];  /* what was really sent */
byte finished = 0;

active proctype sender() {
  byte count = START, seen = START, cell = 0, message = 0, left, number = 0;
  bool first;
#ifdef CELL_BY_COUNT
  cell = START % CELLS;
#endif
  do
  :: message == MESSAGES -> break
  :: else ->
    select (left : 0 .. LONGEST);
    lengths[message] = left;
    first = true;
    do
    :: !first && left == 0 -> break
    :: else ->
#ifndef NO_CREDIT
      if
      :: HAS_CREDIT(seen, NEEDED(count)) -> skip
      :: else ->
        HAS_CREDIT(received, NEEDED(count));
        seen = received
      fi;
#endif
      number++;
#ifdef EARLY_PUBLISH
      sent = NEXT(count);
#endif
      if
      :: first -> length[cell] = lengths[message]
      :: else -> skip
      fi;
      word[cell] = number;
      count = NEXT(count);
#ifndef EARLY_PUBLISH
      sent = count;
#endif
      ADVANCE(cell, count);
      first = false;
      if
      :: left > 0 -> left--
      :: else -> skip
      fi
    od;
    message++
  od;
  finished++
}

active proctype receiver() {
  byte count = START, seen = START, cell = 0, message = 0, left, number = 0;
  bool first;
#ifdef CELL_BY_COUNT
  cell = START % CELLS;
#endif
  do
  :: message == MESSAGES -> break
  :: else ->
    first = true;
    left = 0;
    do
    :: !first && left == 0 -> break
    :: else ->
      if
      :: REACHED(seen, NEXT(count)) -> skip
      :: else ->
        REACHED(sent, NEXT(count));
        seen = sent
      fi;
      number++;
#ifdef EARLY_CREDIT
      received = NEXT(count);
#endif
      if
      :: first ->
        left = length[cell];
        assert(left == lengths[message])
      :: else -> skip
      fi;
      assert(word[cell] == number);
      count = NEXT(count);
#if defined(CREDIT_AT_END)
      if
      :: left <= 1 -> received = count
      :: else -> skip
      fi;
#elif defined(NO_EMPTY_CREDIT)
      if
      :: left > 0 -> received = count
      :: else -> skip
      fi;
#elif !defined(EARLY_CREDIT)
      received = count;
#endif
      ADVANCE(cell, count);
      first = false;
      if
      :: left > 0 -> left--
      :: else -> skip
      fi
    od;
    message++
  od;
  finished++
}

init {
  finished == 2;  /* otherwise an invalid end state: a deadlock */
  assert(received == sent)
}
