"""The demo: a byte-level Kimi Delta Attention language model, trained on the text that comes with Python.

`run` does all of it: read the text, work out a bigram baseline, train against the clock, plot the losses, generate
token by token through the recurrent op, and check that generation sees the same model as training does.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .nn.cache import Cache
from .nn.lm import KimiDeltaLM
from .problem import fail

# Standard-library folders that are tests, tables or other people's packages rather than documented modules.
NOT_PROSE = {
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "turtledemo",
}  # fmt: skip
MAX_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Settings:
    """What the demo is told; model size and batch are what two CPU cores train well in a minute and a half."""

    seconds: float = 90.0
    """Training time."""
    steps: int | None = None
    """Train this many steps instead, however long they take."""
    out: Path = Path("demo")
    """Folder for the plot and the generated text."""
    seed: int = 0
    device: str = "cpu"
    prompt: str = "The "
    generate: int = 400
    """Number of bytes to generate."""
    temperature: float = 0.7
    hidden_size: int = 192
    num_layers: int = 2
    num_heads: int = 3
    head_dim: int = 64
    batch: int = 8
    length: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.05
    windows: int = 32
    """Stretches of validation text, of `window` bytes each."""
    window: int = 512

    def __post_init__(self) -> None:
        if self.steps is None and not self.seconds > 0:
            fail("seconds", self.seconds, "a positive number")
        if self.steps is not None and self.steps < 1:
            fail("steps", self.steps, "at least 1, or None")
        if not self.prompt:
            fail("prompt", repr(self.prompt), "at least one character")
        if self.window < 2:
            fail("window", self.window, "at least 2")

    @classmethod
    def small(cls, **changes: Any) -> Settings:
        """A model for a quick look: a few seconds of training."""
        sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "head_dim": 32, "batch": 4, "length": 128}
        return cls(**{"seconds": 15.0, "window": 256, "generate": 100, **sizes, **changes})


@dataclass(frozen=True)
class Corpus:
    """Bytes `[n]` (int64) of the documents to learn from and of those held out."""

    train: Tensor
    valid: Tensor


@dataclass
class History:
    """Losses in bits a byte, each with its step."""

    train: list[tuple[int, float]] = field(default_factory=list)
    valid: list[tuple[int, float]] = field(default_factory=list)


def documents() -> Iterator[str]:
    """English prose of this Python: its documentation topics, then each standard module's docstrings."""
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions ship it as a package of its own
        pass
    else:
        yield from (topics.topics[name] for name in sorted(topics.topics))
    root = Path(ast.__file__).parent
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(root.rglob("*.py")):
        if NOT_PROSE.intersection(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
        if text := "\n\n".join(t for t in texts if t):
            yield text


def load_corpus(limit: int | None = None) -> Corpus:
    """The documents' bytes, every tenth document held out; `limit` stops after so many bytes."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for i, text in enumerate(documents()):
        data = text.encode("utf-8", "replace") + b"\n\n"
        parts[i % 10 == 9].append(data)
        total += len(data)
        if limit is not None and total >= limit and i >= 9:
            break
    train, valid = (torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8).long() for p in parts)
    return Corpus(train, valid)


def held_out_windows(valid: Tensor, count: int, size: int) -> Tensor:
    """`count` stretches `[count, size]`, evenly spread over the held-out bytes."""
    if len(valid) < size:
        fail("window", size, f"at most {len(valid)}, the number of held-out bytes")
    starts = torch.linspace(0, len(valid) - size, count).long()
    return torch.stack([valid[s : s + size] for s in starts.tolist()])


def bigram_bits(train: Tensor, windows: Tensor) -> float:
    """Bits a byte on `windows` of a bigram model: the training bytes' counts, plus the best of some constants."""
    pairs = torch.zeros(256, 256, dtype=torch.float64)
    pairs.view(-1).index_add_(0, train[:-1] * 256 + train[1:], torch.ones(len(train) - 1, dtype=torch.float64))
    before, after = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    bits = []
    for constant in (1.0, 0.3, 0.1, 0.03, 0.01):
        smoothed = pairs + constant
        chances = smoothed / smoothed.sum(1, keepdim=True)
        bits.append(float(-chances[before, after].log2().mean()))
    return min(bits)


@torch.no_grad()
def model_bits(model: KimiDeltaLM, windows: Tensor, batch: int = 8) -> float:
    """Bits a byte of a model on all but the first byte of `windows`."""
    was_training = model.training
    model.eval()
    total = 0.0
    for part in windows.split(batch):
        logits = model(part[:, :-1])
        total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    model.train(was_training)
    return total / windows[:, 1:].numel() / math.log(2)


def build_model(settings: Settings) -> KimiDeltaLM:
    torch.manual_seed(settings.seed)
    model = KimiDeltaLM(256, settings.hidden_size, settings.num_layers, settings.num_heads, settings.head_dim)
    return model.to(settings.device)


def optimizer_of(model: KimiDeltaLM, settings: Settings) -> torch.optim.Optimizer:
    """AdamW, with weight decay on matrices alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98))


class Threads:
    """Torch's threads while they pay, inside a `with` block.

    Steps this small run many times slower on several threads where other programs keep the cores busy, so that work
    goes on with one as soon as several are no faster. On another device than the CPU nothing changes.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.many = torch.get_num_threads()
        self.settled = self.many == 1 or torch.device(device).type != "cpu"
        self.alone = self.together = 0.0
        self.steps = 0

    def __enter__(self) -> Threads:
        if not self.settled:
            torch.set_num_threads(1)
        return self

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self.many)

    def after(self, seconds: float) -> None:
        """Note a step's time: the second is the measure for one thread (the first warms up), later ones for many."""
        self.steps += 1
        if self.settled:
            return
        if self.steps == 2:
            self.alone = seconds
            torch.set_num_threads(self.many)
        elif self.steps > 3:
            self.together = seconds if self.steps == 4 else 0.7 * self.together + 0.3 * seconds
            if self.together > self.alone:
                self.settled = True
                torch.set_num_threads(1)


def train(
    model: KimiDeltaLM,
    corpus: Corpus,
    windows: Tensor,
    settings: Settings,
    report: Callable[[float, int, History], None] = lambda done, step, history: None,
    threads: Threads | None = None,
) -> History:
    """Train until the time (or the number of steps) is over.

    The learning rate warms up over 30 steps and falls along a cosine of the share of the work that is done, by the
    clock or by steps. `report(share, step, history)` is called after every step; a quarter of the windows is evaluated
    ten times on the way. `threads` is told of every step's time.
    """
    optimizer = optimizer_of(model, settings)
    random = torch.Generator().manual_seed(settings.seed)
    history = History()
    probe = windows[::4]
    offsets = torch.arange(settings.length + 1)
    model.train()
    started = time.monotonic()
    step, done, next_look = 0, 0.0, 0.1
    while done < 1:
        begun = time.monotonic()
        warm = min(1.0, (step + 1) / 30)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))
        starts = torch.randint(len(corpus.train) - settings.length, (settings.batch, 1), generator=random)
        chunk = corpus.train[starts + offsets].to(settings.device)
        logits = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        history.train.append((step, float(loss.detach()) / math.log(2)))
        now = time.monotonic()
        if threads is not None:
            threads.after(now - begun)
        done = min(1.0, step / settings.steps if settings.steps is not None else (now - started) / settings.seconds)
        if next_look <= done < 1:
            next_look = done + 0.1
            history.valid.append((step, model_bits(model, probe)))
        report(done, step, history)
    history.valid.append((step, model_bits(model, windows)))
    model.eval()
    return history


@torch.no_grad()
def decode_difference(model: KimiDeltaLM, tokens: Tensor, prefill: int) -> float:
    """Largest difference of a logit of `tokens` `[B, T]` in one pass and in `prefill` tokens, then token by token."""
    model.eval()
    want = model(tokens)
    cache = Cache()
    pieces = [model(tokens[:, :prefill], cache, use_cache=True)]
    pieces += [model(tokens[:, t : t + 1], cache, use_cache=True) for t in range(prefill, tokens.shape[1])]
    return float((torch.cat(pieces, 1) - want).abs().max())


def generate_text(model: KimiDeltaLM, settings: Settings, emit: Callable[[bytes], None] = lambda byte: None) -> bytes:
    """The prompt and what the model makes of it; `emit` gets every byte as it comes."""
    model.eval()
    prompt = settings.prompt.encode()
    device = torch.device(settings.device)
    random = torch.Generator(device).manual_seed(settings.seed)
    text = bytearray(prompt)
    tokens = torch.tensor([list(prompt)], device=device)
    for token in model.generate(tokens, settings.generate, settings.temperature, random):
        byte = bytes([int(token)])
        text += byte
        emit(byte)
    return bytes(text)


def plot_losses(history: History, baseline: float, path: Path) -> None:
    """The losses over the steps and the bigram baseline, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*zip(*history.train, strict=True), color="0.75", linewidth=0.8, label="training batches")
    axes.plot(*zip(*history.valid, strict=True), color="tab:blue", marker="o", label="validation")
    axes.axhline(baseline, color="tab:red", linestyle="--", label=f"bigram baseline ({baseline:.2f})")
    axes.set(xlabel="step", ylabel="bits per byte", title="Kimi Delta Attention on Python's own documentation")
    axes.set_ylim(0, 8.2)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def run(settings: Settings, console: Any = None) -> int:
    """The whole demo on a rich console; 0 if the model beats the bigram and generation equals one pass, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.panel import Panel
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console() if console is None else console
    corpus = load_corpus()
    windows = held_out_windows(corpus.valid, settings.windows, settings.window)
    baseline = bigram_bits(corpus.train, windows)
    windows = windows.to(settings.device)
    model = build_model(settings)
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"text: {len(corpus.train) / 1e6:.2f} MB of Python's documentation, {len(corpus.valid) / 1e6:.2f} MB held out\n"
        f"model: {settings.num_layers} layers, {count / 1e6:.2f} M parameters, on {settings.device} "
        f"({torch.get_num_threads()} threads)\n"
        f"bigram baseline: {baseline:.3f} bits/byte on the held-out text"
    )
    columns = (
        TextColumn("step {task.fields[step]}"),
        BarColumn(),
        TextColumn("train {task.fields[loss]:.2f}  valid {task.fields[valid]} bits/byte"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Threads(settings.device) as threads, Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=1.0, step=0, loss=8.0, valid="-")
        looks = 0

        def report(done: float, step: int, history: History) -> None:
            nonlocal looks
            recent = [bits for _, bits in history.train[-20:]]
            valid = f"{history.valid[-1][1]:.2f}" if history.valid else "-"
            progress.update(task, completed=done, step=step, loss=sum(recent) / len(recent), valid=valid)
            if len(history.valid) > looks:
                looks = len(history.valid)
                bits = history.valid[-1][1]
                relation = f"{'below' if bits < baseline else 'above'} the bigram's {baseline:.3f}"
                progress.console.print(f"step {step:>5}: validation {bits:.3f} bits/byte, {relation}")

        started = time.monotonic()
        history = train(model, corpus, windows, settings, report, threads)
        elapsed = time.monotonic() - started
    steps, bits = history.valid[-1]
    tokens = steps * settings.batch * settings.length
    beats = bits < baseline
    verdict = "[green]below[/green]" if beats else "[red]not below[/red]"
    console.print(
        f"{steps} steps, {tokens / 1e6:.2f} M bytes in {elapsed:.0f} s ({tokens / elapsed / 1e3:.1f} kB/s)\n"
        f"validation: {bits:.3f} bits/byte, {verdict} the bigram baseline of {baseline:.3f}"
    )
    plot = settings.out / "loss.png"
    plot_losses(history, baseline, plot)
    console.print(f"plot: {plot}")

    size = windows.shape[1]
    with Threads(settings.device):  # a token at a time is no work for several
        difference = decode_difference(model, windows[:1], prefill=size - min(size // 2, 48))
        started = time.monotonic()
        text = generate_text(model, settings).decode("utf-8", "replace")
        elapsed = time.monotonic() - started
    agrees = difference <= MAX_DIFFERENCE
    verdict = "[green]equal[/green]" if agrees else "[red]not equal[/red]"
    console.print(
        f"prefill + decode and one pass: {verdict} (largest difference of a logit {difference:.1e}, "
        f"allowed {MAX_DIFFERENCE:.0e})"
    )
    (settings.out / "generated.txt").write_text(text, encoding="utf-8")
    console.print(Panel(escape(text), title=f"generated token by token ({settings.generate / elapsed:.0f} bytes/s)"))
    return 0 if beats and agrees else 1
