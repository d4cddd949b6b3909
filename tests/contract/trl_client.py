"""TRL's own VLLMClient, as it is, against a server: run by the Python of an environment that has vLLM and TRL.

python trl_client.py ADDRESS [SITE_PACKAGES]: writes what came back as JSON.
"""

import json
import sys

sys.path += sys.argv[2:]

from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1])
told = {
    "model": client.model,
    "generate": client.generate(
        [[5, 17, 300], [9, 8]], n=2, max_tokens=4, logprobs=2, generation_kwargs={"seed": 7}
    ),
    "text": client.generate(["3+4="], max_tokens=2),
    "chat": client.chat([[{"role": "user", "content": "3+4="}]], max_tokens=3, generation_kwargs={"seed": 1}),
    "scored": client.get_sequence_logprobs([[5, 6, 7, 8], [1, 2, 3]], [2, 1], top_logprobs=3),
    "world_size": client.get_world_size(),
    "transfer": client.get_server_info()["weight_transfer_config"],
}
client.reset_prefix_cache()
sys.stdout.write(json.dumps(told) + "\n")
