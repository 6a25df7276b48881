"""How long a step takes, by the number of chunks in a bucket and the order of posting.

`python benchmarks/stream_schedule.py` prints a table. It needs no GPU: it plays the streams E, N
and F of docs/design/streams.md, each of which does one thing after another, with durations that are
assumed (`_ASSUMED`), for q4 on 8 GPUs and buckets of 25 MB. Orders:

within     the engine's: all of a bucket is enqueued before the next one comes.
carried    the last chunk's reduce and decode are enqueued when the next bucket's first chunk has
           been: the link need not wait for that reduce, but the chunk's all-gather stands behind
           an all-to-all whose gradient does not exist yet.
"""

from __future__ import annotations

from collections import deque
from itertools import product

_WORLD_SIZE = 8
_BUCKETS, _BUCKET_BYTES = 12, 25e6
_PACKED_BYTES = _BUCKET_BYTES / 8 * (_WORLD_SIZE - 1) / _WORLD_SIZE  # of one stage
# Seconds and bytes per second, of an H100.
_ASSUMED = {"memory": 3.3e12, "kernel": 4e-6, "collective": 15e-6}
_LINKS = {"25 Gb/s": 3.1e9, "100 Gb/s": 12.5e9, "PCIe": 20e9, "NVLink": 400e9}
_SLOWER = {"idle GPU": 1.0, "beside GEMMs": 5.0}  # kernels, because blocks wait for a place
_READY_EVERY = {
    "link-bound": 0.5,
    "compute-bound": 3.0,
}  # a bucket, in units of its time on the link
_CHUNKS = (1, 2, 3, 4)


def step_seconds(num_chunks: int, carried: bool, link: float, slower: float, every: float) -> float:
    """From the begin of the backward pass to the last mean.

    Args:
        num_chunks: in each bucket.
        carried: the order.
        link: bytes per second.
        slower: factor of the time of kernels.
        every: seconds between buckets.
    """
    encode, reduce, decode = (
        passes * _BUCKET_BYTES / _ASSUMED["memory"] * slower / num_chunks + _ASSUMED["kernel"]
        # Reads and writes, in parts of the gradient: with a residual; 1/8 of it packed, 1/8 owned.
        for passes in (3.1, 0.4, 1.1)
    )
    message = _PACKED_BYTES / link / num_chunks + _ASSUMED["collective"]
    stream_e = stream_n = stream_f = 0.0
    scattered: deque[float] = deque()
    gathered: deque[float] = deque()

    def reduce_one() -> None:
        nonlocal stream_n, stream_f
        stream_f = max(stream_f, scattered.popleft()) + reduce
        stream_n = max(stream_n, stream_f) + message
        gathered.append(stream_n)

    def decode_one() -> None:
        nonlocal stream_f
        stream_f = max(stream_f, gathered.popleft()) + decode

    for bucket in range(1, _BUCKETS + 1):
        for _ in range(num_chunks):
            stream_e = max(stream_e, bucket * every) + encode
            stream_n = max(stream_n, stream_e) + message
            scattered.append(stream_n)
            if len(scattered) > 1:
                reduce_one()
            if len(gathered) > 1:
                decode_one()
        if carried and bucket < _BUCKETS:
            continue
        while scattered:
            reduce_one()
        while gathered:
            decode_one()
    return stream_f


def main() -> None:
    """Prints what each alternative adds to a step of the engine's order with one chunk."""
    cases = [case for case in product(_CHUNKS, (False, True)) if case != (1, False)]
    heads = [f"{n} {'carried' if carried else 'within'}" for n, carried in cases]
    print(f"{'':46}{'1 within':>11}" + "".join(f"{head:>11}" for head in heads))
    for link, gpu, bound in product(_LINKS, _SLOWER, _READY_EVERY):
        every = _READY_EVERY[bound] * 2 * (_PACKED_BYTES / _LINKS[link] + _ASSUMED["collective"])
        usual = step_seconds(1, False, _LINKS[link], _SLOWER[gpu], every)
        others = (step_seconds(*case, _LINKS[link], _SLOWER[gpu], every) for case in cases)
        cells = "".join(f"{other / usual - 1:>+11.1%}" for other in others)
        print(f"{link:10} {gpu:14} {bound:20}{1e6 * usual:>8.0f} us{cells}")


if __name__ == "__main__":
    main()
