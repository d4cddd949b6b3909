"""docs/trl_serve_run.py in an environment that has vLLM, which TRL wants to find, and with TRL from another one:

python trl_async.py SITE_PACKAGES ADDRESS MODEL ROOT STEPS
"""

import sys
from pathlib import Path

sys.path += [sys.argv[1], str(Path(__file__).parents[2] / "docs")]

from trl_serve_run import main  # by its name, since TRL's rollout process imports the reward function again

if __name__ == "__main__":
    main(*sys.argv[2:5], int(sys.argv[5]))
