"""Makes vLLM's child processes find the plugin where the package is a checkout on PYTHONPATH and cannot be installed.

export PYTHONPATH=$(python3 tests/gpu/plugin_on_path.py FOLDER):$PYTHONPATH
"""

from __future__ import annotations

import sys
from pathlib import Path

folder = Path(sys.argv[1])
info = folder / "cacheblend_rag-0.1.0.dist-info"
info.mkdir(parents=True, exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: cacheblend-rag\nVersion: 0.1.0\n")
(info / "entry_points.txt").write_text("[vllm.general_plugins]\ncacheblend = cacheblend.vllm_backend.plugin:register\n")
print(folder)
