"""What a user would do today: a fused Triton kernel writes the scores of a chunk of queries as a float32 table, torch.topk selects.

  python3 dev/bench/torch_select.py [T ...]        (default 131072; needs torch with CUDA, triton)

One JSON line a configuration: causal, one sequence, gaussian bf16 queries and keys. Chunks of queries keep the table at 1 GiB; of more than
64 chunks 64 are timed, evenly spaced, and scaled. Beside it: bench_select, run on the same card.
"""
import json
import sys
import time

import torch
import triton
import triton.language as tl


@triton.jit
def score_kernel(q, k, w, table, row0, n_rows, n_keys, H: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    rows = tl.program_id(1) * BQ + tl.arange(0, BQ)
    keys = tl.program_id(0) * BK + tl.arange(0, BK)
    d = tl.arange(0, D)
    if tl.program_id(0) * BK > row0 + tl.program_id(1) * BQ + BQ - 1:
        return  # no query of the tile sees these keys; topk never reads them as candidates because the table starts at -inf
    kt = tl.load(k + keys[None, :] * D + d[:, None], mask=keys[None, :] < n_keys, other=0.0)
    acc = tl.zeros((BQ, BK), dtype=tl.float32)
    for h in range(H):
        qh = tl.load(q + ((row0 + rows)[:, None] * H + h) * D + d[None, :], mask=rows[:, None] < n_rows, other=0.0)
        wh = tl.load(w + (row0 + rows) * H + h, mask=rows < n_rows, other=0.0)
        acc += wh[:, None] * tl.maximum(tl.dot(qh, kt), 0.0)
    acc = tl.where(keys[None, :] <= (row0 + rows)[:, None], acc, float("-inf"))
    tl.store(table + rows[:, None].to(tl.int64) * n_keys + keys[None, :], acc, mask=(rows[:, None] < n_rows) & (keys[None, :] < n_keys))


def run(T, H, D, k):
    g = torch.Generator("cuda").manual_seed(time.time_ns() % (1 << 31))
    q = torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16, generator=g)
    key = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, generator=g)
    w = torch.rand(T, H, device="cuda", generator=g) / (H * D) ** 0.5
    n = max(64, (1 << 28) // T)
    firsts = [f for f in range(0, T, n) if f + n > k]
    timed = firsts if len(firsts) <= 64 else [firsts[i * len(firsts) // 64] for i in range(64)]
    scores, topk = 0.0, 0.0
    BQ, BK = 64, 128
    table = torch.full((n, T), float("-inf"), device="cuda")
    # a wrong score would make the comparison worthless: one chunk against plain torch
    f = firsts[len(firsts) // 2]
    score_kernel[(triton.cdiv(f + n, BK), triton.cdiv(n, BQ))](q, key, w, table, f, n, T, H, D, BQ, BK, num_warps=8)
    want = (torch.relu(torch.einsum("qhd,kd->qhk", q[f:f + 4].float(), key[: f + 1].float())) * w[f:f + 4, :, None]).sum(1)
    error = (table[:4, : f + 1] - want).abs().max().item() / want.abs().max().item()
    assert error < 1e-2, error
    mark = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    for f in [timed[0]] + timed:  # the first twice: warm-up
        end = f + n
        mark[0].record()
        score_kernel[(triton.cdiv(end, BK), triton.cdiv(n, BQ))](q, key, w, table, f, n, T, H, D, BQ, BK, num_warps=8)
        mark[1].record()
        torch.topk(table[:, :end], k, dim=1, sorted=False)
        mark[2].record()
        torch.cuda.synchronize()
        a, b = mark[0].elapsed_time(mark[1]), mark[1].elapsed_time(mark[2])
        if f == timed[0] and scores == 0.0 and topk == 0.0:
            scores, topk = 1e-9, 1e-9
            continue
        scores, topk = scores + a, topk + b
    scale = len(firsts) / len(timed)
    print(json.dumps({"program": "torch_select", "torch": torch.__version__, "triton": triton.__version__, "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"),
                      "T": T, "H": H, "D": D, "k": k, "chunks_timed": len(timed), "chunks": len(firsts),
                      "scores_ms": round(scores * scale, 3), "topk_ms": round(topk * scale, 3), "total_ms": round((scores + topk) * scale, 3)}), flush=True)


for T in [int(x) for x in sys.argv[1:]] or [131072]:
    for H, D, k in [(4, 64, 512), (8, 64, 1024), (16, 128, 2048), (64, 128, 2048)]:
        if T <= 131072 or H <= 16:
            run(T, H, D, k)
