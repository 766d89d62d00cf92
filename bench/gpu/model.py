"""Write the benchmark's model: random weights behind the recurrent state of Qwen3.5-27B, 149.62 MiB per sequence.

python -m bench.gpu.model PATH
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.models import hybrid_27b_state, write_model


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = Path(sys.argv[1])
    spec = hybrid_27b_state(n_ctx_train=65536)
    if not path.exists():
        write_model(spec, path)
    print(f"{path}: {path.stat().st_size / 2**20:.0f} MiB, {spec.state_bytes / 2**20:.2f} MiB of state per sequence")


if __name__ == "__main__":
    main()
