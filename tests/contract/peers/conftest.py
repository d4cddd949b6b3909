"""The peers are plain modules that find each other as scripts do: beside themselves."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
