"""Speed of the corruptions.

On a CPU: images a second at 32 px for every corruption, beside a plain loop over images in numpy, scipy or
Pillow (`corruption_loops.py`), taken in turns in one run; the loop has one thread whatever `--threads` says. On
CUDA: the whole grid of 10 000 images, 19 corruptions and 5 severities.

    python benchmarks/corruptions.py --threads 1
    python benchmarks/corruptions.py --device cuda
"""

import argparse
import math
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from corruption_loops import LOOPS

from dissensus.data.corruptions import CORRUPTIONS, EXTRA, SEVERITIES, STANDARD, corrupt

SEVERITY = 3


# On a machine that is busy with other work, time on the processor says more than time on the wall, for one thread.
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def on_cpu(images: torch.Tensor, clock: Callable[[], float], names: Sequence[str], repeats: int = 12) -> None:
    arrays = images.permute(0, 2, 3, 1).contiguous().numpy()
    threads = torch.get_num_threads()
    print(f"{len(images)} images of {images.shape[-1]} px, {threads} thread(s), severity {SEVERITY}")
    print(f"{'corruption':32s}{'batch, images/s':>16s}{'loop, images/s':>16s}{'ratio':>8s}")
    for name in names:
        few, random = arrays[: 10 if name == "glass_blur" else 100], np.random.default_rng(0)
        best_batch = best_loop = math.inf
        # In turn, so that what else the machine does falls on both; the first round warms up.
        for _ in range(repeats + 1):
            start = clock()
            corrupt(images, name, SEVERITY)
            middle = clock()
            np.stack([LOOPS[name](image, random).astype(np.uint8) for image in few])
            best_loop = min(best_loop, (clock() - middle) / len(few))
            best_batch = min(best_batch, (middle - start) / len(images))
        ratio = best_loop / best_batch
        print(f"{name:32s}{1 / best_batch:16,.0f}{1 / best_loop:16,.0f}{ratio:8.1f}", flush=True)


def on_cuda(images: torch.Tensor) -> None:
    images = images.cuda()
    print(f"{torch.cuda.get_device_name()}, {len(images)} images of {images.shape[-1]} px, five severities")
    corrupt(images[:10], "gaussian_blur", 1)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    whole = time.perf_counter()
    for name in STANDARD + EXTRA:
        start = time.perf_counter()
        for severity in SEVERITIES:
            corrupt(images, name, severity)
        torch.cuda.synchronize()
        print(f"{name:32s}{time.perf_counter() - start:8.2f} s", flush=True)
    cells = len(images) * len(STANDARD + EXTRA) * len(SEVERITIES)
    total = time.perf_counter() - whole
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"whole grid: {total:.1f} s, {cells / total:,.0f} images/s, peak memory {peak:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="corruptions to time on a CPU; all where none is given")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--images", type=int, default=None, help="512 on a CPU, 10 000 on CUDA where not given")
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    count = options.images or (512 if options.device == "cpu" else 10_000)
    # Smooth random fields: no corruption's time depends on what an image shows.
    coarse = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 255
    images = torch.nn.functional.interpolate(coarse, size=options.side, mode="bilinear").to(torch.uint8)
    print(f"torch {torch.__version__}, numpy {np.__version__}, {platform.processor() or platform.machine()}")
    if options.device == "cuda":
        on_cuda(images)
    else:
        on_cpu(images, CLOCKS[options.clock], options.names or tuple(CORRUPTIONS))


if __name__ == "__main__":
    main()
