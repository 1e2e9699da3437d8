"""Train a small Kimi Delta Attention language model on Python's own documentation and generate text from it.

    python examples/train_lm.py                   # 90 s of training on the CPU
    python examples/train_lm.py --small           # a quick look: 15 s, a smaller model
    python examples/train_lm.py --device cuda --seconds 30

It prints the validation loss against a bigram baseline, writes `loss.png` and `generated.txt` to `--out`, and exits
with 1 if the model does not beat the baseline or if generation token by token differs from one pass.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deltafuse.demo import Settings, run


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help=f"training time (default {default.seconds:.0f})")
    parser.add_argument("--steps", type=int, help="train this many steps instead, however long they take")
    parser.add_argument("--out", type=Path, help=f"folder for the plot and the text (default {default.out})")
    parser.add_argument("--seed", type=int, help=f"of weights, batches and sampling (default {default.seed})")
    parser.add_argument("--device", help=f"torch device (default {default.device})")
    parser.add_argument("--prompt", help=f"what the generated text starts with (default {default.prompt!r})")
    parser.add_argument("--generate", type=int, help=f"bytes to generate (default {default.generate})")
    parser.add_argument("--temperature", type=float, help=f"of sampling, 0 for greedy (default {default.temperature})")
    parser.add_argument("--small", action="store_true", help="a smaller model and 15 s")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    build = Settings.small if given.pop("small") else Settings
    return run(build(**given))


if __name__ == "__main__":
    sys.exit(main())
