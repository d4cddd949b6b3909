"""vLLM's own HTTPVLLMWeightSyncClient, as it is, against a server: run by the Python of an environment that has vLLM.

python vllm_weight_client.py ADDRESS DIRECTORY VERSION
"""

import sys

from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

client = HTTPVLLMWeightSyncClient(sys.argv[1])
client.init_weight_transfer_engine({})
client.start_weight_update()
client.update_weights({"directory": sys.argv[2]})
client.finish_weight_update(sys.argv[3])
client.shutdown_weight_transfer_engine()
