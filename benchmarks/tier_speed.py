"""I/O of the file tiers beside raw O_DIRECT access to the same file system, in the same run.

    python benchmarks/tier_speed.py --path /mnt/nvme --size 8GiB --rounds 5 [--json FILE]

Raw access is what a benchmark such as fio does: as many threads as the tier has, each with requests of the same size
into buffers that are allocated once, no checksum, nothing else. Rows take turns within every round; what counts is the
median of the rounds, and the share of raw of the same run (the disk of a virtual machine varies by the hour). Checksums
are timed alone, per byte and thread, and by a tier that has none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from slideformer_backend.config import SIZE
from slideformer_backend.storage import BlockTier, PosixTier, SpillDirectory, block_tier
from slideformer_backend.storage.checksum import ZEROS, block_sums
from slideformer_backend.storage.kvikio_tier import file_tier
from slideformer_backend.storage.posix_tier import aligned_buffer

Moves = dict[str, Callable[[], None]]


def raw(path: str, nbytes: int, threads: int, request: int, buffer: memoryview) -> Moves:
    """Plain O_DIRECT reads and writes of a file that has its blocks."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    pool = ThreadPoolExecutor(threads)

    def all_of(call: Callable[..., int]) -> Callable[[], None]:
        def one(start: int) -> None:
            moved = call(fd, [buffer[start : start + request]], start)
            if moved != min(request, nbytes - start):
                raise OSError(f"{moved} bytes moved at {start}")

        return lambda: list(pool.map(one, range(0, nbytes, request)))

    return {"write": all_of(os.pwritev), "read": all_of(os.preadv)}


def of_tier(tier: BlockTier, name: str, flat: torch.Tensor) -> Moves:
    """The same through a tier."""
    region = tier.allocate(name, flat.numel())
    return {
        "write": lambda: tier.write(region, 0, flat).synchronize(),
        "read": lambda: tier.read(region, 0, flat).synchronize(),
    }


class Unchecked(PosixTier):
    """The POSIX tier without checksums, to see what they cost."""

    def _write_whole(self, region, start, source):
        region.sums[start // self.block] = ZEROS
        self.store(region, start, source)

    def _read_whole(self, region, start, target):
        self.load(region, start, target)


def measure(rows: dict[str, Moves], nbytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median bytes per second of every row, by direction; the first round is not counted."""
    seen: dict[tuple[str, str], list[float]] = {}
    for turn in range(rounds + 1):
        for direction in ("write", "read"):
            for name, moves in rows.items():
                start = time.perf_counter()
                moves[direction]()
                if turn:
                    seen.setdefault((name, direction), []).append(nbytes / (time.perf_counter() - start))
    return {name: {d: statistics.median(seen[name, d]) for d in ("write", "read")} for name in rows}


def checksum_seconds_per_byte(flat: torch.Tensor) -> float:
    """Of one thread, over memory that is not in a cache."""
    requests = flat[: 1 << 30].split(block_tier.REQUEST)
    start = time.perf_counter()
    for request in requests:
        block_sums(request, block_tier.BLOCK)
    return (time.perf_counter() - start) / sum(request.numel() for request in requests)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="folder on the disk to measure")
    parser.add_argument("--size", default="4GiB", help="bytes per row and direction")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse()
    nbytes = int(SIZE.parse(arguments.size)) // block_tier.REQUEST * block_tier.REQUEST
    buffer = aligned_buffer(nbytes, 4096)
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    flat.view(torch.int64).copy_(torch.arange(nbytes // 8))  # no block of zeros, which a tier would not write
    directory = SpillDirectory(arguments.path)
    tier = PosixTier(directory, arguments.threads)
    unchecked = Unchecked(directory, arguments.threads)
    rows = {
        "raw O_DIRECT": raw(directory.file("raw"), nbytes, tier.threads, tier.request, buffer),
        "posix tier": of_tier(tier, "posix", flat),
        "posix tier, no checksums": of_tier(unchecked, "unchecked", flat),
    }
    kvikio = file_tier(directory, arguments.threads, from_device=True) if torch.cuda.is_available() else tier
    if kvikio is not tier and isinstance(kvikio, BlockTier) and kvikio.name == "kvikio":
        rows["kvikio tier, host buffer"] = of_tier(kvikio, "host", flat)
        rows["kvikio tier, device buffer"] = of_tier(kvikio, "device", flat.cuda())
    try:
        found = measure(rows, nbytes, arguments.rounds)
        cost = checksum_seconds_per_byte(flat)
    finally:
        for made in (tier, unchecked, kvikio):
            made.close()
        directory.close()
    print(f"{nbytes / 2**30:.1f} GiB, {arguments.rounds} rounds, {tier.describe()}")
    if kvikio is not tier:
        print(kvikio.describe())
    base = found["raw O_DIRECT"]
    for name, speeds in found.items():
        cells = [f"{d} {v / 1e9:6.2f} GB/s ({v / base[d]:5.1%} of raw)" for d, v in speeds.items()]
        print(f"{name:28} {'   '.join(cells)}")
    print(f"checksums: {1e-9 / cost:.1f} GB/s per thread, {cost * 1e9:.1%} of I/O time at 1 GB/s")
    if arguments.json:
        report = {"bytes": nbytes, "speeds": found, "checksum_seconds_per_byte": cost, "tier": tier.describe()}
        Path(arguments.json).write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
