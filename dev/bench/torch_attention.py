#!/usr/bin/env python3
"""PyTorch's attention on the shapes of bench_attention.cu, in its JSON fields ("program": "torch"). Needs torch (2.11) and a CUDA device, nothing else.

  python3 dev/bench/torch_attention.py dense|sparse [--seed N] [--tokens N] [--heads N] [--topk N] [--seconds N]

dense   causal scaled_dot_product_attention over all tokens, bf16, 12 and 16 heads of 64, T = 8192 .. 65536: as torch chooses ("default"), and with the flash and
        cuDNN backends asked for by name. backend: the operator that the profiler saw
sparse  MQA over selected rows, T = 16384 and 65536, sets as bench_attention's: the k rows of each query are gathered (a chunk of queries at a time: gathered rows of
        all do not fit), then method "gather_sdpa" (the heads of a query are SDPA's queries) or "gather_einsum" (two products and a float32 softmax).
        backward runs each chunk's forward again, then autograd, then index_add of the rows' gradients into a float32 d_kv

flop counts what the mathematics needs, as there: forward 2 pairs H (Dk + Dv), backward 2 pairs H (3 Dk + 2 Dv). Shapes that are not reached within --seconds
(100), or that a backend refuses, get a line "skipped" with the reason. Outputs are checked: finite, and four queries against a plain loop in float64.
"""
import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

LIMIT = 2e-2  # relative error of bf16 outputs
CHUNK_BYTES = 1 << 30  # gathered rows of a chunk


def line(what, **fields):
    print(json.dumps({"program": "torch", "mode": ARGS.mode, "what": what, **fields}), flush=True)


def measure(work):
    """Median, smallest and largest milliseconds of 3 to 20 runs, about 100 ms of them, after two that are not counted."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    ms, reps = [], 20
    work()
    for r in range(-1, 20):
        if r >= reps:
            break
        torch.cuda.synchronize()
        start.record()
        work()
        end.record()
        end.synchronize()
        t = start.elapsed_time(end)
        if r < 0:
            reps = int(max(3, min(20, 100 / t)))
        else:
            ms.append(t)
    return {"ms": statistics.median(ms), "ms_low": min(ms), "ms_high": max(ms), "reps": len(ms)}


def backend_of(work):
    """The SDPA operators that work runs, from the profiler's list."""
    with profile(activities=[ProfilerActivity.CPU]) as p:
        work()
    torch.cuda.synchronize()
    names = {e.key.split("::")[-1] for e in p.key_averages()}
    kinds = [k for k in ("flash_attention", "cudnn_attention", "efficient_attention", "attention_math") if any(n.startswith("_scaled_dot_product_" + k) for n in names)]
    return "+".join(kinds) if kinds else "none"


def rates(t, flop, product):
    tflops = flop / t["ms"] * 1e-9
    return {**t, "flop": flop, "tflops": tflops, "tflops_of_product": tflops / product}


def verify(out, want, shape):
    """Stop where outputs are wrong: nothing is timed then."""
    if not torch.isfinite(out).all():
        sys.exit(f"torch_attention.py: FAILED: outputs that are not finite, {shape}")
    for i, w in want.items():
        error = ((out[i].double() - w).norm() / w.norm()).item()
        if not error <= LIMIT:
            sys.exit(f"torch_attention.py: FAILED: query {i} differs from a plain loop by {error:.3g}, expected at most {LIMIT}, {shape}")


def machine():
    """The first line; returns the rate of an 8192^3 product in TFLOP/s and of a copy in GB/s."""
    n, size = 8192, 1 << 31
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    d = torch.empty_like(a)
    product = measure(lambda: torch.mm(a, b.t(), out=d))
    x, y = torch.randn(size // 4, device="cuda"), torch.empty(size // 4, device="cuda")
    copy = measure(lambda: y.copy_(x))
    tflops, gbs = 2 * n**3 / product["ms"] * 1e-9, 2 * size / copy["ms"] * 1e-6

    def ask(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown"

    line("machine", device=torch.cuda.get_device_name(), driver=ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), cuda=torch.version.cuda,
         date=datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"), git=ask("git", "describe", "--always", "--dirty"), precision="bf16", seed=ARGS.seed,
         torch=torch.__version__, cudnn=torch.backends.cudnn.version(), product_tflops=tflops, copy_gbs=gbs, **{"product_" + k: v for k, v in product.items()}, **{"copy_" + k: v for k, v in copy.items()})
    return tflops, gbs


def late(shape):
    """Whether the time is over; the shape is then named."""
    over = time.monotonic() - START > ARGS.seconds
    if over:
        line("skipped", **shape, reason=f"not reached within --seconds {ARGS.seconds}")
    return over


def dense(product, _):
    D = 64
    wanted = {"default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for T in [ARGS.tokens] if ARGS.tokens else [8192, 16384, 32768, 65536]:
        for H in [ARGS.heads] if ARGS.heads else [12, 16]:
            q, k, v, d_o = (torch.randn(1, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(4))
            inputs = [x.requires_grad_() for x in (q, k, v)]
            pairs = T * (T + 1) // 2
            want = {}
            with torch.no_grad():
                for i in (0, T // 3, T // 2, T - 1):
                    p = torch.softmax(torch.einsum("hd,htd->ht", q[0, :, i].double(), k[0, :, : i + 1].double()) * D**-0.5, -1)
                    want[i] = torch.einsum("ht,htd->hd", p, v[0, :, : i + 1].double())
            for name, backend in wanted.items():
                shape = {"method": name, "tokens": T, "heads": H, "head_size": D}
                if late(shape):
                    continue

                def forward():
                    if backend is None:
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
                    with sdpa_kernel(backend):
                        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

                try:
                    out = forward()
                    seen = backend_of(forward)
                    verify(out[0].detach().transpose(0, 1), want, shape)
                    t_forward = measure(forward)
                    t_backward = measure(lambda: torch.autograd.grad(out, inputs, d_o, retain_graph=True))
                except RuntimeError as e:
                    line("skipped", **shape, reason=str(e).splitlines()[0])
                    continue
                shape = {**shape, "backend": seen, "pairs": pairs}
                line("forward", **shape, **rates(t_forward, 2 * pairs * H * 2 * D, product))
                line("backward", **shape, **rates(t_backward, 2 * pairs * H * 5 * D, product))


def selection(T, k, recent):
    """(T, k) int32, ascending, -1 behind the last: one row in each of k equal parts of what a query sees; recent: half of them so before the last 2k tokens, half in these."""
    out = torch.empty(T, k, dtype=torch.int32, device="cuda")
    j = torch.arange(k, device="cuda")[None]
    for t0 in range(0, T, 8192):
        n = torch.arange(t0 + 1, min(T, t0 + 8192) + 1, device="cuda")[:, None]
        last = torch.clamp(n, max=2 * k) if recent else torch.zeros_like(n)
        before = n - last
        old = torch.clamp(before, max=k - k // 2) if recent else torch.full_like(n, k)
        first, parts, base, at = (torch.where(j < old, x, y) for x, y in ((before, last), (old, k - old), (torch.zeros_like(n), before), (j, j - old)))
        parts = torch.clamp(parts, min=1)
        lo, hi = base + at * first // parts, base + (at + 1) * first // parts
        s = lo + (torch.rand(lo.shape, device="cuda", dtype=torch.float64) * (hi - lo)).long()
        out[t0 : t0 + len(n)] = torch.where(n <= k, torch.where(j < n, j, -1), s).int()
    return out


def sparse_attend(method, q, rows, Dv, scale, mask):
    """Attention of q (n, H, Dk) over rows (n, k, Dk), whose first Dv channels are the values; mask (n, k) or None."""
    if method == "gather_sdpa":
        return F.scaled_dot_product_attention(q[:, None], rows[:, None], rows[:, None, :, :Dv], attn_mask=None if mask is None else mask[:, None, None], scale=scale)[:, 0]
    logits = torch.einsum("nhd,nkd->nhk", q, rows).float() * scale
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None], float("-inf"))
    return torch.einsum("nhk,nkd->nhd", torch.softmax(logits, -1).to(q.dtype), rows[..., :Dv])


def sparse_shape(T, Dv, rope, H, k, kind, product, copy):
    Dk = Dv + rope
    shape = {"kv_lora": Dv, "rope": rope, "heads": H, "k": k, "tokens": T, "selection": kind}
    if late(shape):
        return
    q, kv, d_o = (torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((T, H, Dk), (T, Dk), (T, H, Dv)))
    sel = selection(T, k, kind == "recent")
    scale = (64 + rope) ** -0.5
    out, d_q, d_kv = torch.full_like(d_o, float("nan")), torch.empty_like(q), torch.zeros(T, Dk, device="cuda")
    n = max(1, CHUNK_BYTES // (k * Dk * 2))
    chunks = [(a, min(k, T, a + n)) for a in range(0, min(k, T), n)] + [(a, min(T, a + n)) for a in range(k, T, n)]  # short rows, which need a mask, by themselves
    pairs = sum(min(t + 1, k) for t in range(T))
    want = {}
    for i in (0, T // 3, T // 2, T - 1):
        rows = kv[sel[i][sel[i] >= 0].long()].double()
        want[i] = torch.softmax(q[i].double() @ rows.t() * scale, -1) @ rows[:, :Dv]

    def gathered(a, b):
        index = sel[a:b].clamp(min=0).view(-1)
        return index, kv.index_select(0, index).view(b - a, k, Dk), sel[a:b] >= 0 if a < k else None

    for method in ("gather_sdpa", "gather_einsum"):

        def forward():
            with torch.no_grad():
                for a, b in chunks:
                    _, rows, mask = gathered(a, b)
                    out[a:b] = sparse_attend(method, q[a:b], rows, Dv, scale, mask)

        def backward():
            d_kv.zero_()
            for a, b in chunks:
                index, rows, mask = gathered(a, b)
                rows.requires_grad_()
                x = q[a:b].detach().requires_grad_()
                d_q[a:b], d_rows = torch.autograd.grad(sparse_attend(method, x, rows, Dv, scale, mask), (x, rows), d_o[a:b])
                d_kv.index_add_(0, index, d_rows.view(-1, Dk).float())

        try:
            forward()
            verify(out, want, shape)
            seen = backend_of(forward)
            d_q.fill_(float("nan"))
            seen_backward = backend_of(backward)
            if not (torch.isfinite(d_q).all() and torch.isfinite(d_kv).all()):
                sys.exit(f"torch_attention.py: FAILED: gradients that are not finite, {shape}")
            times = measure(forward), measure(backward)
        except RuntimeError as e:
            line("skipped", **shape, method=method, reason=str(e).splitlines()[0])
            continue
        for what, t, width, kind_seen in (("forward", times[0], Dk + Dv, seen), ("backward", times[1], 3 * Dk + 2 * Dv, seen_backward)):
            gbs = pairs * Dk * 2 / t["ms"] * 1e-6
            line(what, **shape, method=method, backend=kind_seen, chunk=n, pairs=pairs, **rates(t, 2 * pairs * H * width, product), gather_gbs=gbs, gather_of_copy=gbs / copy)


def sparse(product, copy):
    for T in [ARGS.tokens] if ARGS.tokens else [16384, 65536]:
        for kind in ("random", "recent"):
            for k in [ARGS.topk] if ARGS.topk else [512, 1024, 2048]:
                for Dv, rope in ((128, 32), (256, 32), (256, 64), (512, 64)):
                    for H in [ARGS.heads] if ARGS.heads else [8, 12, 16, 64]:
                        sparse_shape(T, Dv, rope, H, k, kind, product, copy)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("mode", choices=["dense", "sparse"])
parser.add_argument("--seed", type=int, default=int(time.time()))
parser.add_argument("--tokens", type=int, default=0, help="only this length")
parser.add_argument("--heads", type=int, default=0, help="only this many heads")
parser.add_argument("--topk", type=int, default=0, help="sparse: only this k")
parser.add_argument("--seconds", type=int, default=100, help="no new shape after this time")
ARGS = parser.parse_args()
if not torch.cuda.is_available():
    sys.exit("torch_attention.py: no CUDA device: expected an NVIDIA GPU and a torch built for it")
START = time.monotonic()
torch.manual_seed(ARGS.seed)
(dense if ARGS.mode == "dense" else sparse)(*machine())
