#!/usr/bin/env python3
"""Draw SVG from the trainer's log.jsonl files and from tables of JSON lines. Python 3, standard library only.

  plot.py loss  OUT.svg LOG.jsonl[:label] ... [--x step|tokens] [--rungs]
  plot.py lines OUT.svg TABLE.jsonl ... --x T --y seconds [--by pattern] [--logx] [--logy]

loss:  validation loss with markers, training loss as a thin line; --rungs adds byte-level baselines of Austen.
lines: one line for each value of --by (columns, comma-separated); columns NAME_min and NAME_max of --y become bars.
Both take --title, --xlabel, --ylabel, --ymin, --ymax.
"""
import argparse, json, math, os, re, sys
from html import escape

W, H = 760, 440
COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#5b3a91", "#444444"]  # Okabe-Ito, darkened
RUNGS = [("order-1", 2.451), ("order-2", 1.978), ("order-3", 1.630), ("order-4", 1.462), ("PPMd o8", 1.163)]
UNITS = {"T": "sequence length T (tokens)", "seconds": "time of a step (s)", "step": "optimizer step", "tokens": "training tokens",
         "tok_s": "throughput (tokens/s)", "gflops": "rate (GFLOP/s)", "tflops": "rate (TFLOP/s)", "ms": "time (ms)"}


def read_jsonl(path):
    """The objects of a JSON-lines file; a line that is not JSON (a run that was killed, a nan) is named and left out."""
    rows = []
    with open(path, encoding="utf-8") as f:
        for n, line in enumerate(f, 1):
            try:
                row = json.loads(re.sub(r": -?(nan|inf)\b", ": null", line)) if line.strip() else None
                if isinstance(row, dict):
                    rows.append(row)
            except ValueError:
                print(f"plot.py: {path}:{n}: not JSON, left out", file=sys.stderr)
    return rows


def number(v):
    return isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v)


def text(v):
    """A tick's number: 8192, 0.05, 20k, 1.5M."""
    for size, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(v) >= size and v % 1 == 0 and v % (size / 1000 if size > 1e4 else 100) == 0:
            return f"{v / (1e3 if suffix == 'k' else size):g}{suffix}"
    return f"{v:.10g}"


class Axis:
    """A scale from values to pixels, with its ticks."""

    def __init__(self, values, log, p0, p1, lo=None, hi=None, points=()):
        self.log, self.p0, self.p1 = log, p0, p1
        values = [v for v in values if v > 0] if log else list(values)
        if not values:
            sys.exit("plot.py: nothing to draw" + (" on a logarithmic axis: no positive values" if log else ""))
        a, b = min(values), max(values)
        if log:
            pad = (b / a) ** 0.04 if b > a else 2
            a, b = a / pad, b * pad
        else:
            pad = (b - a) * 0.04 or abs(a) * 0.1 or 1
            a, b = (a - pad if a < 0 or a > 0.3 * b else 0), b + pad
        self.a, self.b = a if lo is None else lo, b if hi is None else hi
        if not self.a < self.b or log and self.a <= 0:
            sys.exit(f"plot.py: an axis from {self.a:g} to {self.b:g} cannot be drawn")
        if log and 2 <= len(points) <= 10 and all(v > 0 and math.log2(v) % 1 == 0 for v in points):
            self.ticks = sorted(points)  # powers of two: label what was measured
        elif log:
            for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
                self.ticks = [m * 10.0 ** e for e in range(math.floor(math.log10(self.a)), math.ceil(math.log10(self.b)) + 1) for m in steps]
                self.ticks = [t for t in self.ticks if self.a <= t <= self.b]
                if len(self.ticks) >= 4:
                    break
        else:
            raw = (self.b - self.a) / 6
            step = 10.0 ** math.floor(math.log10(raw))
            step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw)
            self.ticks = [i * step for i in range(math.ceil(self.a / step), math.floor(self.b / step + 1e-9) + 1)]

    def __call__(self, v):
        f = math.log if self.log else float
        return self.p0 + (f(v) - f(self.a)) / (f(self.b) - f(self.a)) * (self.p1 - self.p0)

    def has(self, v):
        return number(v) and (v > 0 or not self.log)


def draw(out, series, a, xlabel, ylabel, rungs=(), bottom=None, top=None, points=()):
    """series: (label, color, [(x, y, low, high)], thin). Labels of thin lines are not in the legend."""
    legend, x, y = [], 62, (44 if a.title else 18)  # the legend's rows, above the plot
    for label, color, _, thin in series:
        if thin or not label:
            continue
        width = 40 + 7 * len(label)
        if x > 62 and x + width > W - 20:
            x, y = 62, y + 18
        legend.append((x, y, label, color))
        x += width
    left, right, t, b = 62, W - (88 if rungs else 24), (y + 16 if legend else y), H - 52
    xs = [p[0] for s in series for p in s[2]]
    ys = [v for s in series for p in s[2] for v in p[1:] if v is not None] + [r[1] for r in rungs]
    if not xs:
        sys.exit("plot.py: nothing to draw")
    X = Axis(xs, a.logx, left, right, points=points)
    Y = Axis(ys, a.logy, b, t, bottom if a.ymin is None else a.ymin, top if a.ymax is None else a.ymax)
    o = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" width="{W}" height="{H}" role="img" '
         f'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#333">',
         f'<title>{escape(a.title or ylabel + " against " + xlabel)}</title>',
         f'<rect width="{W}" height="{H}" fill="#fff"/>',
         f'<clipPath id="c"><rect x="{left}" y="{t}" width="{right - left}" height="{b - t}"/></clipPath>']
    if a.title:
        o.append(f'<text x="{left}" y="22" font-size="15" font-weight="bold" fill="#111">{escape(a.title)}</text>')
    for v in X.ticks:
        o.append(f'<path d="M{X(v):.1f} {t}V{b}" stroke="#e4e4e4"/><text x="{X(v):.1f}" y="{b + 17}" text-anchor="middle">{text(v)}</text>')
    for v in Y.ticks:
        o.append(f'<path d="M{left} {Y(v):.1f}H{right}" stroke="#e4e4e4"/><text x="{left - 7}" y="{Y(v) + 4:.1f}" text-anchor="end">{text(v)}</text>')
    last = -99
    for name, v in sorted(rungs, key=lambda r: -r[1]):
        if not Y.a <= v <= Y.b:
            continue
        last = max(Y(v) + 4, last + 12)  # labels keep a line's distance
        o.append(f'<path d="M{left} {Y(v):.1f}H{right}" stroke="#777" stroke-dasharray="5 4"/>'
                 f'<text x="{right + 5}" y="{last:.1f}" font-size="11" fill="#555">{escape(name)} {v:.3f}</text>')
    o.append(f'<path d="M{left} {t}V{b}H{right}" fill="none" stroke="#333"/>')
    o.append(f'<text x="{(left + right) / 2}" y="{H - 14}" text-anchor="middle" font-size="13">{escape(xlabel)}</text>')
    o.append(f'<text transform="translate(16 {(t + b) / 2:.0f}) rotate(-90)" text-anchor="middle" font-size="13">{escape(ylabel)}</text>')
    o.append('<g clip-path="url(#c)">')
    for _, color, pts, thin in series:
        pts = [p for p in pts if X.has(p[0]) and Y.has(p[1])]
        if pts:
            path = "L".join(f"{X(p[0]):.1f} {Y(p[1]):.1f}" for p in pts)
            o.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-linejoin="round" ' + ('stroke-width="1" opacity="0.45"/>' if thin else 'stroke-width="2"/>'))
        for px, py, low, high in [] if thin else pts:
            if Y.has(low) and Y.has(high) and abs(Y(low) - Y(high)) > 1:
                o.append(f'<path d="M{X(px):.1f} {Y(low):.1f}V{Y(high):.1f}m-4 0h8M{X(px) - 4:.1f} {Y(low):.1f}h8" stroke="{color}"/>')
            if len(pts) <= 60:
                o.append(f'<circle cx="{X(px):.1f}" cy="{Y(py):.1f}" r="3" fill="{color}"/>')
    o.append("</g>")
    for x, y, label, color in legend:
        o.append(f'<path d="M{x} {y - 4}h18" stroke="{color}" stroke-width="2"/><circle cx="{x + 9}" cy="{y - 4}" r="3" fill="{color}"/>'
                 f'<text x="{x + 24}" y="{y}">{escape(label)}</text>')
    with open(out, "w", encoding="utf-8") as f:
        f.write("\n".join(o) + "\n</svg>\n")


def losses(path, by_tokens):
    """Training and validation points of one log. A resumed run replaces what lies behind its checkpoint."""
    train, val, tokens = {}, {}, {0: 0}
    for r in read_jsonl(path):
        s = r.get("step")
        if r.get("event") in ("start", "resume"):
            train, val, tokens = ({k: v for k, v in d.items() if k <= s} for d in (train, val, tokens))
        elif r.get("event") == "step":
            train[s], tokens[s] = r.get("loss"), tokens.get(s - 1, 0) + r.get("tokens", 0)
        elif r.get("event") == "eval":
            val[s] = r.get("loss")
    points = lambda d: [(tokens.get(s, 0) if by_tokens else s, v, None, None) for s, v in sorted(d.items()) if number(v)]
    train, bucket = points(train), 1 + len(train) // 1000  # long runs: means over a few steps
    train = [(c[-1][0], sum(p[1] for p in c) / len(c), None, None) for c in (train[i:i + bucket] for i in range(0, len(train), bucket))]
    return train, points(val)


def plot_loss(a):
    thin, thick = [], []
    for i, arg in enumerate(a.files):
        path, _, label = (arg, "", "") if os.path.exists(arg) else arg.rpartition(":")
        train, val = losses(path, a.x == "tokens")
        color, label = COLORS[i % len(COLORS)], label or os.path.basename(os.path.dirname(path)) or path
        thin.append((label, color, train, True))
        thick.append((label + ("" if val else " (training)"), color, val or train, False))
    # The first steps would take most of the height: the top is the largest validation loss, where there is one.
    top = max((p[1] for s in thick if s[2] for p in s[2][:1]), default=None)
    rungs = RUNGS if a.rungs else ()
    values = [p[1] for s in thin + thick for p in s[2]] + [r[1] for r in rungs]
    bottom, top = (0.95 * min(values), max([1.08 * top] + [1.05 * r[1] for r in rungs])) if values else (None, None)
    draw(a.out, thin + thick, a, a.xlabel or UNITS[a.x], a.ylabel or "loss (nats a token); thin: training", rungs, bottom, top)


def plot_lines(a):
    groups = {}
    for r in (r for path in a.files for r in read_jsonl(path)):
        if number(r.get(a.x)) and number(r.get(a.y)):
            key = ", ".join(str(r.get(c, "")) for c in a.by.split(",")) if a.by else a.y
            groups.setdefault(key, []).append((r[a.x], r[a.y], r.get(a.y + "_min"), r.get(a.y + "_max")))
    series = [(k, COLORS[i % len(COLORS)], sorted(v, key=lambda p: p[0]), False) for i, (k, v) in enumerate(groups.items())]
    draw(a.out, series, a, a.xlabel or UNITS.get(a.x, a.x), a.ylabel or UNITS.get(a.y, a.y), points={p[0] for v in groups.values() for p in v})


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    for name in ("loss", "lines"):
        s = sub.add_parser(name)
        s.add_argument("out")
        s.add_argument("files", nargs="+")
        for o in ("--title", "--xlabel", "--ylabel"):
            s.add_argument(o)
        for o in ("--ymin", "--ymax"):
            s.add_argument(o, type=float)
        for o in ("--logx", "--logy"):
            s.add_argument(o, action="store_true")
        if name == "loss":
            s.add_argument("--x", choices=("step", "tokens"), default="step")
            s.add_argument("--rungs", action="store_true")
        else:
            s.add_argument("--x", required=True)
            s.add_argument("--y", required=True)
            s.add_argument("--by")
    a = p.parse_args()
    plot_loss(a) if a.what == "loss" else plot_lines(a)
