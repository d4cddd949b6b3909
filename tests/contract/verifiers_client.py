"""The TrainClient of `verifiers`, over `renderers`, as it is, against a server: run by the Python of an environment that has both.

python verifiers_client.py ADDRESS MODEL: two turns of a conversation, the second bridged from the tokens of the first as in a
rollout; writes what came back as JSON.
"""

import asyncio
import json
import sys

from renderers.configs import Qwen3RendererConfig
from verifiers.v1.clients import TrainClient, TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig, UserMessage

address, model = sys.argv[1:]
PROMPTS = ("3+4=", "5+6=")


async def rollout():
    client = TrainClient(
        TrainClientConfig(
            base_url=f"{address}/v1",
            api_key_var="NO_KEY",
            renderer=Qwen3RendererConfig(thinking_retention="all"),
            renderer_model_name=model,
        )
    )
    trace = Trace(task=TraceTask(type="sums", data=TaskData()), agent=AgentInfo(config={}))
    messages, turns = [], []
    for place, prompt in enumerate(PROMPTS):
        messages.append(UserMessage(content=prompt))
        turn = prepare_turn(trace, messages)
        # What prime-rl adds: the version that a rollout began with, as salt.
        sampling = SamplingConfig(temperature=1.0, max_tokens=6, seed=place + 1, cache_salt="7")
        body = {"model": model, "messages": []}
        answer = await client.get_response(ChatDialect(), body, sampling, session_id=trace.id, turn=turn)
        turn.commit(answer)
        messages.append(answer.message)
        turns.append(
            {
                "prompt_ids": answer.tokens.prompt_ids,
                "completion_ids": answer.tokens.completion_ids,
                "logprobs": answer.tokens.completion_logprobs,
                "bridged": answer.tokens.bridged,
                "finish_reason": answer.finish_reason,
            }
        )
    await client.close()
    return turns


sys.stdout.write(json.dumps(asyncio.run(rollout())) + "\n")
