"""The run that docs/sync.md shows: an update that arrives, one without a layer, one that is lost, and what may be trained on.

python docs/sync_run.py DIRECTORY
"""

import copy
import sys
from pathlib import Path

import torch

from zerodrift import models
from zerodrift.backends.exact import ExactBackend
from zerodrift.core.errors import NoReceipt
from zerodrift.core.request import Prompt, Request, SamplingParams
from zerodrift.sync.canary import random_canary
from zerodrift.sync.key import create_key
from zerodrift.sync.ledger import ReceiptLedger, require_receipt
from zerodrift.sync.take import ReceiptTaker
from zerodrift.weights.digest import checkpoint_state


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def main(directory: Path) -> None:
    directory.mkdir(parents=True)
    engine, model = ExactBackend("testbed:qwen3"), models.load("testbed:qwen3")
    ledger = ReceiptLedger(directory / "receipts", create_key(directory / "receipt.key"))
    receipts = ReceiptTaker(engine, random_canary(512, 640, avoid=range(4)), ledger)
    receipts.start(model, "step 0")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    for step, what in enumerate(("sent", "without layer 1", "sent again", "lost"), start=1):
        before = copy.deepcopy(checkpoint_state(model))
        if what != "sent again":
            ids = torch.tensor(random_canary(512, 64, seed=step).sequences)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = checkpoint_state(model)
        if what == "without layer 1":
            state = {name: before[name] if ".layers.1." in name else tensor for name, tensor in state.items()}
        if what != "lost":
            engine.engine.swap_weights(state, f"step {step}")
        receipt = receipts.take(model, f"step {step}")
        say(f"step {step}, {what}:", receipt.arrival, receipt.cause or "", "-", receipt.message)
        rollouts(engine, ledger)


def rollouts(engine: ExactBackend, ledger: ReceiptLedger) -> None:
    [answer] = engine.generate([Request(Prompt((5, 6)), SamplingParams(max_tokens=4, seed=0))])
    try:
        let_in = require_receipt(ledger.stamp(answer.completions, "0"), ledger)
    except NoReceipt as error:
        say(f"  [{error.code}] {error}")
    else:
        say(f"  {len(let_in)} rollout let in")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
