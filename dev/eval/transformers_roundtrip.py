#!/usr/bin/env python3
"""Open checkpoints of this trainer with Hugging Face transformers and compare.

Usage: transformers_roundtrip.py [TRAINER]      (default ./train_cpu; run from the repository root)
Needs torch and transformers >= 5.17. For each published class (only D: deepseek_v32; D and S: glm_moe_dsa; only F:
deepseek_v3) a small model is trained for a few steps, then AutoModelForCausalLM.from_pretrained(folder) must find every
tensor and no other, the mean loss over a held-out text must agree with the trainer's own, and 64 greedy tokens as well.
Exit status 0 only if all hold.
"""
import json, os, subprocess, sys, tempfile
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

def stable_topk(x, k, dim=-1, largest=True, sorted=True):
    """torch.topk leaves ties open, and relu makes many index scores exactly 0; ours go to the lowest index. So does this."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


trainer = sys.argv[1] if len(sys.argv) > 1 else "./train_cpu"
T = 96
bad = 0


def report(ok, text):
    global bad
    bad += not ok
    print(("ok   " if ok else "FAIL ") + text, flush=True)


with tempfile.TemporaryDirectory() as tmp:
    held_out = os.path.join(tmp, "held_out.txt")
    with open("data/austen/persuasion.txt", "rb") as f, open(held_out, "wb") as g:
        g.write(f.read(40 * T))
    for name, options in (("D", []), ("DS", ["--model-type", "glm_moe_dsa"]), ("F", [])):
        out = os.path.join(tmp, name)
        common = [trainer, "--layers", name, "--seq-len", str(T), "--batch-size", "8", "--index-topk", "16", "--val", held_out, "--out", out, "--eval-every", "0",
                  "--sample-every", "0", "--probe", "0", "--num-hidden-layers", "4", "--hidden-size", "64", "--intermediate-size", "96", "--rms-norm-eps", "1e-5"] + options
        subprocess.run(common + ["--steps", "60", "--warmup-dense", "30", "--lr", "5e-3"], check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(out, "log.jsonl")) as f:
            ours = [e for e in map(json.loads, f) if e["event"] == "eval"][-1]["loss"]
        folder = os.path.join(out, "step_000060")
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager", dtype=torch.float32)
        left = {k: v for k, v in info.items() if v}
        report(not left, f"{name}: {type(model).__name__} takes every tensor and no other {left or ''}")
        data = [256] + list(open(held_out, "rb").read())
        rows = (len(data) - 1) // T
        x = torch.tensor([data[i * T:i * T + T + 1] for i in range(rows)])
        with torch.no_grad():
            published = model(input_ids=x[:, :-1], labels=None, use_cache=False).logits
        torch.Tensor.topk = stable_topk
        torch.topk = stable_topk
        with torch.no_grad():
            logits = model(input_ids=x[:, :-1], use_cache=False).logits
        moved = torch.nn.functional.cross_entropy(published.reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1)).item()
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1)).item()
        report(abs(loss - ours) < 2e-5, f"{name}: loss over {rows} rows: transformers {loss:.6f} with ties to the lowest index ({moved:.6f} with torch.topk's), the trainer {ours:.6f}")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        prompt = "Anne had always thought"
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        report(ids[0].tolist() == list(prompt.encode()), f"{name}: the tokenizer gives the bytes")
        with torch.no_grad():
            for _ in range(64):  # greedy, without a cache: the plainest use of the class
                ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        theirs = tokenizer.decode(ids[0])
        text = subprocess.run([trainer, "--generate", folder, "--prompt", prompt, "--temperature", "0", "--sample-tokens", "64"], check=True, capture_output=True).stdout.decode()
        report(text.rstrip("\n") == theirs.rstrip("\n"), f"{name}: 64 greedy tokens agree: {theirs!r}" if text.rstrip() == theirs.rstrip() else f"{name}: greedy tokens: {text!r} and {theirs!r}")
print(f"{'all hold' if not bad else str(bad) + ' failed'}")
sys.exit(1 if bad else 0)
