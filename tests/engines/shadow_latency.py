"""What does the proxy add to a request? The same request to the engine and through the proxy, in turns.

python tests/engines/shadow_latency.py ENGINE_URL PROXY_URL [REQUESTS]
"""

import sys
import time

import httpx2
import numpy as np

WARM = 20
PROMPT = list(range(4, 68))


def seconds(client, url, model, number):
    """Of one request, whose prompt begins with a token and a salt of its own: neither side finds it in a cache."""
    prompt = [4 + number % 400, *PROMPT]
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": 1,
        "seed": 0,
        "logprobs": 0,
        "cache_salt": f"{url[-5:]}{number}",
    }
    begun = time.perf_counter()
    answer = client.post(f"{url}/v1/completions", json=body)
    taken = time.perf_counter() - begun
    answer.raise_for_status()
    return taken


def measured(engine, proxy, requests):
    """The median of what is added, by neighbours, and a line that says it."""
    with httpx2.Client(timeout=60, trust_env=False) as client:
        model = client.get(f"{engine}/v1/models").json()["data"][0]["id"]
        pairs = [
            (seconds(client, engine, model, n), seconds(client, proxy, model, n))
            for n in range(requests + WARM)
        ]
    direct, through = 1000 * np.array(pairs[WARM:]).T
    low, middle, high = np.quantile(through - direct, (0.25, 0.5, 0.75))
    says = (
        f"{len(direct)} requests: direct {np.median(direct):.2f} ms, through {np.median(through):.2f} ms (medians); "
        f"added, by neighbours: {middle:.2f} ms [{low:.2f}, {high:.2f}]\n"
    )
    return middle / 1000, says


if __name__ == "__main__":
    sys.stdout.write(measured(*sys.argv[1:3], int(*(sys.argv[3:] or [400])))[1])
