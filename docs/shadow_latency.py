"""What does the proxy add to a request? The same request to the engine and through the proxy, in turns, medians of each.

python docs/shadow_latency.py ENGINE_URL PROXY_URL [REQUESTS]
"""

import sys
import time

import httpx2
import numpy as np

ASK = {"prompt": list(range(4, 68)), "max_tokens": 1, "temperature": 1, "seed": 0, "logprobs": 0}
WARM = 20


def one(client, url, model, number):
    """Seconds; a prompt of its own, so that both sides find nothing in the cache."""
    body = {
        **ASK,
        "model": model,
        "prompt": [4 + number % 400, *ASK["prompt"]],
        "cache_salt": f"{url[-5:]}{number}",
    }
    begun = time.perf_counter()
    answer = client.post(f"{url}/v1/completions", json=body)
    seconds = time.perf_counter() - begun
    answer.raise_for_status()
    return seconds


def main(engine, proxy, requests=400):
    """Print both medians, and the median of the differences of neighbours with its quartiles."""
    with httpx2.Client(timeout=60, trust_env=False) as client:
        model = client.get(f"{engine}/v1/models").json()["data"][0]["id"]
        pairs = [
            (one(client, engine, model, n), one(client, proxy, model, n)) for n in range(int(requests) + WARM)
        ]
    direct, through = 1000 * np.array(pairs[WARM:]).T
    low, middle, high = np.quantile(through - direct, (0.25, 0.5, 0.75))
    print(
        f"{len(direct)} requests: direct {np.median(direct):.2f} ms, through {np.median(through):.2f} ms (medians)"
    )
    print(
        f"added: {np.median(through) - np.median(direct):.2f} ms; of neighbours {middle:.2f} ms [{low:.2f}, {high:.2f}]"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
