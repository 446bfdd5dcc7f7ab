"""The published schedules, as functions of the number of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tp_kernels.comm.errors import ShapeError

from .schedule import Action, Kind, Schedule, lay_out, overlap

F, I, W, B = Kind.F, Kind.I, Kind.W, Kind.B  # noqa: E741


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965).

    Bubble (p - 1) / m of the ideal time; every stage keeps m activations.
    """
    _check(ranks, micro_batches)
    batch = range(micro_batches)
    orders = [
        [*(Action(rank, F, k) for k in batch), *(Action(rank, B, k) for k in batch)]
        for rank in range(ranks)
    ]
    return lay_out("gpipe", orders, range(ranks), micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """A backward as soon as there is one, then the next forward (PipeDream-Flush, arXiv 2006.09503).

    Bubble (p - 1) / m of the ideal time, as GPipe; stage s keeps only min(p - s, m) activations. With fewer
    micro-batches than ranks, which torch refuses, the first ranks run all forwards first.
    """
    _check(ranks, micro_batches)
    orders = [
        _alternate(
            [Action(rank, F, k) for k in range(micro_batches)],
            [Action(rank, B, k) for k in range(micro_batches)],
            ahead=ranks - 1 - rank,
        )
        for rank in range(ranks)
    ]
    return lay_out("one_f_one_b", orders, range(ranks), micro_batches)


def pipedream(ranks: int, micro_batches: int) -> Schedule:
    """1F1B without a flush: parameters change after every micro-batch (Narayanan et al., SOSP 2019).

    The order is that of `one_f_one_b`, whose start-up is paid once per run and not once per batch; the
    runner keeps the version of the weights that each forward used until its backward.
    """
    _check(ranks, micro_batches)
    same = one_f_one_b(ranks, micro_batches)
    orders = [same.order(rank) for rank in range(ranks)]
    return lay_out("pipedream", orders, range(ranks), micro_batches, flush=False)


def interleaved_one_f_one_b(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B with `chunks` stages per rank; stage s is on rank s mod p (Narayanan et al., arXiv 2104.04473).

    Bubble (p - 1) / (v m) of the ideal time where p divides m. Micro-batches go through the chunks of a rank
    in equal rounds of p or a few more. Any m is served: where there are no equal rounds, which torch
    refuses, the last of the rounds of p runs without the micro-batches that do not exist.
    """
    _check(ranks, micro_batches, chunks)
    size = _round_size(ranks, micro_batches)
    count = -(-micro_batches // size) * size
    orders = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, F, k) for stage, k in _rounds(own, size, count)]
        backwards = [Action(stage, B, k) for stage, k in _rounds(own[::-1], size, count)]
        ahead = (chunks - 1) * size + 2 * (ranks - 1 - rank)
        orders.append(_alternate(forwards, backwards, ahead))
    placement = [stage % ranks for stage in range(ranks * chunks)]
    return _only("interleaved_one_f_one_b", orders, placement, micro_batches)


def forward_only(ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Inference: forwards alone, in the order in which `interleaved_one_f_one_b` runs them."""
    _check(ranks, micro_batches, chunks)
    size = _round_size(ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        own = range(rank, ranks * chunks, ranks)
        orders.append([Action(stage, F, k) for stage, k in _rounds(own, size, micro_batches)])
    placement = [stage % ranks for stage in range(ranks * chunks)]
    return lay_out("forward_only", orders, placement, micro_batches)


def zero_bubble_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B whose weight gradients fill its gaps, in the memory of 1F1B (Qi et al., arXiv 2401.10241, ZB-H1).

    Bubble (p - 1)(F + I - W); no stage keeps more than min(p, m) activations.
    """
    return _zero_bubble("zero_bubble_h1", ranks, micro_batches, hop=1)


def zero_bubble_h2(ranks: int, micro_batches: int) -> Schedule:
    """As `zero_bubble_h1`, with up to 2p - 1 activations per stage (Qi et al., ZB-H2).

    No rank is idle between its first and its last action if F = I = W and m >= 2p - 1.
    """
    return _zero_bubble("zero_bubble_h2", ranks, micro_batches, hop=2)


def _zero_bubble(name: str, ranks: int, micro_batches: int, hop: int) -> Schedule:
    _check(ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        # A rank is `hop` forwards ahead per stage behind it, and as many weight gradients behind per
        # stage before it, so that all ranks hold the same number of micro-batches.
        ahead = min(hop * (ranks - 1 - rank), micro_batches)
        behind = hop * rank
        order = [Action(rank, F, k) for k in range(ahead)]
        for k in range(micro_batches):
            order += [Action(rank, F, ahead + k)] if ahead + k < micro_batches else []
            order += [Action(rank, I, k)]
            order += [Action(rank, W, k - behind)] if k >= behind else []
        order += [Action(rank, W, k) for k in range(max(0, micro_batches - behind), micro_batches)]
        orders.append(order)
    return lay_out(name, orders, range(ranks), micro_batches)


def zero_bubble_v(ranks: int, micro_batches: int) -> Schedule:
    """Two stages per rank, placed as a V: rank r has stages r and 2p - 1 - r.

    From Qi et al. (arXiv 2401.10241 and 2405.15362, ZB-V). No rank is idle between its first and its last
    action if F = I = W and m >= 2p - 1, with at most 2p activations per rank, of stages half as deep as
    those of `one_f_one_b`.
    """
    _check(ranks, micro_batches)
    # Too few micro-batches to fill the V: the same order without those that do not exist.
    count = max(2 * ranks - 1, micro_batches)
    orders = []
    for rank in range(ranks):
        down = _Counter(rank)
        up = _Counter(2 * ranks - 1 - rank)
        order = [down.next(F) for _ in range(2 * (ranks - rank) - 1)]
        for _ in range(rank):
            order += [up.next(F), down.next(F)]
        for _ in range(ranks - rank):
            order += [up.next(F), up.next(I), up.next(W)]
        while up.counts[F] < count:
            order += [down.next(F)] if down.counts[F] < count else []
            order += [down.next(I), down.next(W), up.next(F), up.next(I), up.next(W)]
        for _ in range(rank):
            order += [down.next(I), up.next(I)]
        for _ in range(ranks - rank):
            order += [down.next(I), down.next(W)]
        order += [up.next(W) for _ in range(up.counts[I] - up.counts[W])]
        order += [down.next(W) for _ in range(down.counts[I] - down.counts[W])]
        orders.append(order)
    return _only("zero_bubble_v", orders, _v_placement(ranks), micro_batches)


def dual_pipe_v(ranks: int, micro_batches: int) -> Schedule:
    """DualPipe of DeepSeek-V3 (arXiv 2412.19437) cut in half: stages r and 2p - 1 - r on rank r.

    The cut is Qi et al.'s; bubble (p - 1)(F&B + B - 3W) with at most 2p + 1 activations per rank, as
    published. Fewer micro-batches than stages, where torch refuses, run the order of 2p without those
    that do not exist.
    """
    _check(ranks, micro_batches)
    count = max(2 * ranks, micro_batches)
    orders = []
    for rank in range(ranks):
        down, up = _Counter(rank), _Counter(2 * ranks - 1 - rank)
        behind = ranks - 1 - rank  # ranks between this one and the turn of the V
        order = [down.next(F) for _ in range(2 * behind)]
        for _ in range(rank + 1):
            order += [down.next(F), up.next(F)]
        for _ in range(behind):
            order += [up.next(I), up.next(W), up.next(F)]
        for i in range(count - 2 * ranks + rank + 1):
            pair = (down.next(F), up.next(B))
            # The last rank starts its first backward without waiting for the pair.
            order += pair if i == 0 and behind == 0 else (overlap(*pair),)
            order += [overlap(up.next(F), down.next(B))]
        for _ in range(behind):
            order += [up.next(B), overlap(up.next(F), down.next(B))]
        # The second half of the last backwards leaves its weight gradients for the gaps that follow.
        late: list[_Counter] = []
        for i in range(2 * (rank + 1)):
            side = down if i % 2 else up
            order += [side.next(I if i > rank else B)]
            late += [side] if i > rank else []
        for _ in range(behind):
            order += [late.pop(0).next(W)] if late else []
            order += [down.next(I)]
            late += [down]
        order += [side.next(W) for side in late]
        orders.append(order)
    return _only("dual_pipe_v", orders, _v_placement(ranks), micro_batches)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    make.__name__: make
    for make in (
        gpipe,
        one_f_one_b,
        interleaved_one_f_one_b,
        pipedream,
        zero_bubble_h1,
        zero_bubble_h2,
        zero_bubble_v,
        dual_pipe_v,
        forward_only,
    )
}


class _Counter:
    """Hands out the actions of one stage, each kind in the order of the micro-batches."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.counts = {F: 0, I: 0, W: 0}

    def next(self, kind: Kind) -> Action:
        taken = (I, W) if kind is B else (kind,)
        action = Action(self.stage, kind, self.counts[taken[0]])
        for part in taken:
            self.counts[part] += 1
        return action


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then forward and backward in turns, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    pairs = zip(forwards[ahead:], backwards, strict=False)
    turns = [action for pair in pairs for action in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def _round_size(ranks: int, micro_batches: int) -> int:
    """Micro-batches per round: equal rounds of at least `ranks` if there are any, else `ranks`.

    Longer rounds make messages wait: a boundary holds up to `size - ranks + 1` of them.
    """
    rounds = max(1, micro_batches // ranks)
    return micro_batches // rounds if micro_batches % rounds == 0 else ranks


def _rounds(stages: Iterable[int], size: int, micro_batches: int) -> list[tuple[int, int]]:
    """(stage, micro-batch) round by round: all micro-batches of a round through one stage after another."""
    return [
        (stage, k)
        for first in range(0, micro_batches, size)
        for stage in stages
        for k in range(first, min(first + size, micro_batches))
    ]


def _v_placement(ranks: int) -> list[int]:
    return [*range(ranks), *reversed(range(ranks))]


def _only(
    name: str, orders: list[list[Action]], placement: Sequence[int], micro_batches: int
) -> Schedule:
    """The schedule of `orders` without the micro-batches from `micro_batches` on."""
    kept = []
    for order in orders:
        cells: list[Action] = []
        for cell in order:
            parts = [part for part in cell.unpacked() if (part.micro_batch or 0) < micro_batches]
            cells += [cell] if len(parts) == len(cell.unpacked()) else parts
        kept.append(cells)
    return lay_out(name, kept, placement, micro_batches)


def _check(ranks: int, micro_batches: int, chunks: int = 1) -> None:
    for what, number in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if number < 1:
            raise ShapeError(f"{what} is {number}: a schedule needs at least 1")
