"""The faults. Each is a function that patches vLLM; the decorator holds what the key says."""
import math
import os
import time

from .core import (
    CPU_RUNNER, KVUTILS, LOGPROBS, OUTPUT, RUNNER, SAMPLER, STEP, TOPK, attn_of,
    hidden_draw, in_hook, kv_hook, kv_views, layers, on_model, on_new_requests,
    on_sampler_output, on_weights, out_hook, scale_rows, set_sampled_logprob,
    track_steps, when_imported, wrap, write_zero,
)

FAULTS = {}


class Fault:
    def __init__(self, apply, **meta):
        self.apply = apply
        self.meta = meta


def fault(id, family, what, names=(), model="qwen3", must_name=False, located=None,
          settings="any request", note=None, marginal=False):
    def deco(fn):
        assert id not in FAULTS, id
        FAULTS[id] = Fault(fn, id=id, family=family, what=what, true_names=list(names),
                           model=model, must_name=must_name, located=located,
                           settings=settings, note=note, marginal=marginal)
        return fn

    return deco


Q, L = "qwen3", "llama"
ANY = "any request; prompt_logprobs show it"

# ============================================================ arithmetic, small


@fault("as01", "arithmetic-small", "Head 2 of layer 1: attention output times 0.998 before the output projection.",
       located=dict(layer=1, part="attention", head=2, factor=0.998), settings=ANY)
def _():
    def f(x):
        x = x.clone()
        x[..., 128:192] *= 0.998
        return x

    on_model(lambda m, r: in_hook(attn_of(m, 1).o_proj, f))


@fault("as02", "arithmetic-small", "Softmax scale of the attention of layer 2 is 0.3 per cent too large.",
       located=dict(layer=2, part="attention-scale", factor=1.003), settings=ANY)
def _():
    def f(m, r):
        impl = attn_of(m, 2).attn.impl
        impl.scale = impl.scale * 1.003

    on_model(f)


@fault("as03", "arithmetic-small", "Softmax scale of the attention is 1.5 per cent too small in every layer.",
       model=L, located=dict(layer="all", part="attention-scale", factor=0.985), settings=ANY)
def _():
    def f(m, r):
        for layer in layers(m):
            layer.self_attn.attn.impl.scale *= 0.985

    on_model(f)


@fault("as04", "arithmetic-small", "The final norm uses epsilon 0.01 in place of 1e-6.",
       located=dict(part="final-norm", eps=0.01), settings=ANY)
def _():
    def f(m, r):
        m.model.norm.variance_epsilon = 0.01

    on_model(f)


@fault("as05", "arithmetic-small", "The norm before the MLP of layer 0 has a gain 0.1 per cent too large.",
       located=dict(layer=0, part="post-attention-norm", factor=1.001), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(layers(m)[0].post_attention_layernorm, lambda h: h * 1.001))


@fault("as06", "arithmetic-small", "MLP neuron 271 of layer 2 is dead.",
       located=dict(layer=2, part="mlp", neuron=271, factor=0.0), settings=ANY)
def _():
    def f(x):
        x = x.clone()
        x[..., 271] = 0
        return x

    on_model(lambda m, r: in_hook(layers(m)[2].mlp.down_proj, f))


@fault("as07", "arithmetic-small", "Keys and values of layer 1 are rounded to bfloat16 before they are stored.",
       ["path/kv-precision"], must_name=False, located=dict(layer=1, part="kv", dtype="bfloat16"), settings=ANY)
def _():
    f = lambda k, v: (k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype))
    on_model(lambda m, r: kv_hook(attn_of(m, 1).attn, f))


@fault("as08", "arithmetic-small", "Keys and values of all layers are rounded to fp8 (e4m3) before they are stored.",
       ["path/kv-precision"], model=L, must_name=True, located=dict(layer="all", part="kv", dtype="float8_e4m3"),
       settings=ANY)
def _():
    import torch

    r8 = lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)

    def f(m, r):
        for layer in layers(m):
            kv_hook(layer.self_attn.attn, lambda k, v: (r8(k), r8(v)))

    on_model(f)


@fault("as09", "arithmetic-small", "The down projection of layer 0 is loaded as bfloat16 values.",
       ["weights/dtype", "path/body-precision", "path/weight-quantisation"],
       located=dict(layer=0, part="mlp.down_proj", dtype="bfloat16"), settings=ANY)
def _():
    def f(n, it):
        for name, t in it:
            if "layers.0.mlp.down_proj" in name:
                t = t.bfloat16().to(t.dtype)
            yield name, t

    on_weights(f)


@fault("as10", "arithmetic-small", "All logits are multiplied by 1.003 in the model.",
       ["semantic/temperature"], located=dict(part="logits", factor=1.003), settings=ANY,
       note="the same as temperature/1.003 everywhere, prompt logprobs included")
def _():
    on_model(lambda m, r: out_hook(m.logits_processor, lambda x: x * 1.003))


@fault("as11", "arithmetic-small", "Logits are soft-capped: 150*tanh(x/150).",
       located=dict(part="logits", softcap=150.0), settings=ANY)
def _():
    import torch

    on_model(lambda m, r: out_hook(m.logits_processor, lambda x: 150.0 * torch.tanh(x / 150.0)))


@fault("as12", "arithmetic-small", "Token ids 284, 203 and 40 carry a constant logit bias of +0.25.",
       ["semantic/logit-bias"], model=L, must_name=True,
       located=dict(part="logits", tokens=[40, 203, 284], bias=0.25), settings=ANY)
def _():
    def f(x):
        x = x.clone()
        x[..., [284, 203, 40]] += 0.25
        return x

    on_model(lambda m, r: out_hook(m.logits_processor, f))


@fault("as13", "arithmetic-small", "The residual stream entering layer 2 is multiplied by 0.985.",
       located=dict(layer=2, part="residual-in", factor=0.985), settings=ANY)
def _():
    def f(m, r):
        def hook(mod, args, kwargs=None):
            pos, h, res = args
            return (pos, h * 0.985, None if res is None else res * 0.985)

        layers(m)[2].register_forward_pre_hook(hook)

    on_model(f)


def _angle_tables(rope, angles):
    import torch

    t = torch.cat((angles.cos(), angles.sin()), dim=-1)
    rope.cos_sin_cache = t.to(rope.cos_sin_cache.dtype)


def _angles(rope):
    import torch

    inv = rope._compute_inv_freq(rope.base)
    t = torch.arange(rope.cos_sin_cache.shape[0], dtype=torch.float)
    return t[:, None] * inv[None, :]


@fault("as14", "arithmetic-small", "Rotary frequencies number 8 to 11 (of 32) are 2 per cent too fast.",
       ["path/rope"], model=L, located=dict(part="rope", band=[8, 11], factor=1.02), settings=ANY)
def _():
    def f(m, r):
        rope = attn_of(m, 0).rotary_emb
        a = _angles(rope)
        a[:, 8:12] *= 1.02
        _angle_tables(rope, a)

    on_model(f)


@fault("as15", "arithmetic-small", "The output head is computed in bfloat16 (weights, input and logits rounded).",
       ["path/head-precision"], must_name=True, located=dict(part="lm_head", dtype="bfloat16"), settings=ANY)
def _():
    def w(n, it):
        for name, t in it:
            if name.startswith("lm_head"):
                t = t.bfloat16().to(t.dtype)
            yield name, t

    on_weights(w)
    rnd = lambda x: x.bfloat16().to(x.dtype)

    def f(m, r):
        lp = m.logits_processor

        def pre(mod, args):
            return (args[0], rnd(args[1])) + tuple(args[2:])

        lp.register_forward_pre_hook(pre)
        out_hook(lp, rnd)

    on_model(f)


@fault("as16", "arithmetic-small", "Gate and up projections of layer 1 are int8-quantised per output row.",
       ["path/weight-quantisation"], located=dict(layer=1, part="mlp.gate_up", bits=8), settings=ANY)
def _():
    def f(n, it):
        for name, t in it:
            if "layers.1.mlp.gate_proj" in name or "layers.1.mlp.up_proj" in name:
                s = t.abs().amax(dim=1, keepdim=True) / 127.0
                t = (t / s).round().clamp(-127, 127) * s
            yield name, t

    on_weights(f)


@fault("as17", "arithmetic-small", "The MLP activation of layer 1 is x*sigmoid(1.03 x) in place of x*sigmoid(x).",
       model=L, located=dict(layer=1, part="mlp.act", beta=1.03), settings=ANY)
def _():
    import torch

    def f(m, r):
        def hook(mod, args, out):
            g, u = args[0].chunk(2, dim=-1)
            return g * torch.sigmoid(1.03 * g) * u

        layers(m)[1].mlp.act_fn.register_forward_hook(hook)

    on_model(f)


@fault("as18", "arithmetic-small", "The embeddings of 24 token ids (every 21st from 3) are 4 per cent too long.",
       located=dict(part="embedding", tokens="range(3, 507, 21)", factor=1.04),
       settings="acts where such a token is in the context (about one token in twenty)")
def _():
    import torch

    def f(m, r):
        def hook(mod, args, out):
            ids = args[0]
            hit = ((ids - 3) % 21 == 0) & (ids < 507) & (ids >= 3)
            return out * (1.0 + 0.04 * hit.to(out.dtype)).unsqueeze(-1)

        m.model.embed_tokens.register_forward_hook(hook)

    on_model(f)


@fault("as19", "arithmetic-small", "Values of KV head 1 in layer 0 carry a constant offset of 0.02 in every channel.",
       model=L, located=dict(layer=0, part="v", kv_head=1, offset=0.02), settings=ANY)
def _():
    def g(k, v):
        v = v.clone()
        v[..., 64:] += 0.02
        return k, v

    on_model(lambda m, r: kv_hook(attn_of(m, 0).attn, g))


@fault("as20", "arithmetic-small", "The outputs of attention and MLP are rounded to bfloat16 in every layer.",
       ["path/body-precision"], must_name=True, located=dict(layer="all", part="attention,mlp outputs", dtype="bfloat16"), settings=ANY)
def _():
    rnd = lambda x: x.bfloat16().to(x.dtype)

    def f(m, r):
        for layer in layers(m):
            out_hook(layer.self_attn, rnd)
            out_hook(layer.mlp, rnd)

    on_model(f)


@fault("as21", "arithmetic-small", "Head 3 of layer 0: attention output times 1.0015 before the output projection.",
       model=L, located=dict(layer=0, part="attention", head=3, factor=1.0015), settings=ANY)
def _():
    def f(x):
        x = x.clone()
        x[..., 192:256] *= 1.0015
        return x

    on_model(lambda m, r: in_hook(attn_of(m, 0).o_proj, f))


# ============================================================ arithmetic, gross


@fault("ag01", "arithmetic-gross", "The attention of layer 1 contributes nothing.",
       located=dict(layer=1, part="attention", factor=0.0), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(attn_of(m, 1), lambda x: x * 0))


@fault("ag02", "arithmetic-gross", "The weights of layers 0 and 2 are loaded under each other's names.",
       ["weights/swapped"], must_name=False, located=dict(layers=[0, 2]), settings=ANY)
def _():
    def f(n, it):
        for name, t in it:
            if ".layers.0." in name:
                name = name.replace(".layers.0.", ".layers.2.")
            elif ".layers.2." in name:
                name = name.replace(".layers.2.", ".layers.0.")
            yield name, t

    on_weights(f)


@fault("ag03", "arithmetic-gross", "Gate and up projection of layer 1 are exchanged.",
       ["weights/swapped"], model=L, located=dict(layer=1, part="mlp.gate/up"), settings=ANY)
def _():
    def f(n, it):
        for name, t in it:
            if "layers.1.mlp.gate_proj" in name:
                name = name.replace("gate_proj", "up_proj")
            elif "layers.1.mlp.up_proj" in name:
                name = name.replace("up_proj", "gate_proj")
            yield name, t

    on_weights(f)


@fault("ag04", "arithmetic-gross", "The two KV heads of layer 2 are exchanged (queries read the wrong group).",
       located=dict(layer=2, part="kv-heads"), settings=ANY)
def _():
    import torch

    sw = lambda x: torch.cat((x[..., 64:], x[..., :64]), dim=-1)
    on_model(lambda m, r: kv_hook(attn_of(m, 2).attn, lambda k, v: (sw(k), sw(v))))


@fault("ag05", "arithmetic-gross", "The MLP output of layer 0 is added twice to the residual stream.",
       model=L, located=dict(layer=0, part="mlp", factor=2.0), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(layers(m)[0].mlp, lambda x: x * 2))


@fault("ag06", "arithmetic-gross", "Embeddings are multiplied by sqrt(hidden size), as in another model family.",
       located=dict(part="embedding", factor=16.0), settings=ANY)
def _():
    on_model(lambda m, r: out_hook(m.model.embed_tokens, lambda x: x * 16.0))


# ==================================================================== position


@fault("po01", "position", "Rotary base is 500000 in place of 1000000.",
       ["path/rope"], must_name=True, located=dict(part="rope", base=500000.0), settings=ANY)
def _():
    def f(m, r):
        rope = attn_of(m, 0).rotary_emb
        rope.base = 500000.0
        _angle_tables(rope, _angles(rope))

    on_model(f)


@fault("po02", "position", "Generated tokens are rotated one position too far; prompt tokens are right.",
       ["path/rope", "path/prefill-decode"], model=L, located=dict(part="rope", where="decode", offset=1),
       settings="generate; compare with the same tokens as prompt")
def _():
    import torch

    def before(runner, kw):
        if STEP.decode.any():
            p = kw["positions"].clone()
            n = len(STEP.decode)
            p[:n] += torch.from_numpy(STEP.decode.astype("int64"))
            kw["positions"] = p.clamp_(max=1023)

    track_steps(before)


@fault("po03", "position", "Rotary positions stop counting at 256.",
       ["path/rope", "path/context-boundary"], located=dict(part="rope", position=256),
       settings="prompts longer than 256 tokens")
def _():
    def before(runner, kw):
        kw["positions"] = kw["positions"].clamp(max=256)

    track_steps(before)


@fault("po04", "position", "Rotary positions are divided by 1.03 (linear scaling).",
       ["path/rope"], model=L, must_name=True, located=dict(part="rope", factor=1.03), settings=ANY)
def _():
    def f(m, r):
        rope = attn_of(m, 0).rotary_emb
        _angle_tables(rope, _angles(rope) / 1.03)

    on_model(f)


@fault("po05", "position", "Layer 1 attends to a sliding window of 64 tokens only.",
       ["path/window"], located=dict(layer=1, part="attention", window=64),
       settings="prompts longer than 64 tokens")
def _():
    def f(m, r):
        attn_of(m, 1).attn.impl.sliding_window = 64

    on_model(f)


@fault("po06", "position", "From position 384 on, the attention output of layer 0 is multiplied by 0.9.",
       ["path/context-boundary"], located=dict(layer=0, part="attention", position=384, factor=0.9),
       settings="prompts longer than 384 tokens")
def _():
    track_steps()
    on_model(lambda m, r: out_hook(
        attn_of(m, 0), lambda x: scale_rows(x, STEP.positions >= 384, 0.9) if STEP.active else x))


@fault("po07", "position", "In layer 0 keys are rotated one position further than queries.",
       ["path/rope"], model=L, located=dict(layer=0, part="rope-keys", offset=1), settings=ANY)
def _():
    import torch

    class KeyAhead(torch.nn.Module):
        def __init__(self, rope):
            super().__init__()
            self.rope = rope

        def forward(self, positions, q, k):
            q2, _ = self.rope(positions, q.clone(), k.clone())
            _, k2 = self.rope((positions + 1).clamp(max=1023), q.clone(), k.clone())
            return q2, k2

    def f(m, r):
        a = attn_of(m, 0)
        a.rotary_emb = KeyAhead(a.rotary_emb)

    on_model(f)


# ======================================================================= cache
LONG = "prompts of more than 128 tokens (one block), the same prefix asked more than once, without prompt_logprobs"


def _rehash(change):
    def patch(mod):
        orig = mod.hash_block_tokens
        if getattr(orig, "_exam", False):
            return

        def hash_block_tokens(fn, parent, tokens, extra=None):
            return change(orig, fn, parent, tokens, extra)

        hash_block_tokens._exam = True
        mod.hash_block_tokens = hash_block_tokens

    when_imported(KVUTILS, patch)


@fault("ca01", "cache", "The prefix cache does not look at the last 32 tokens of a block (of 128).",
       ["path/prefix-cache"], located=dict(part="block-hash", ignored="tokens 96..127 of each block"),
       settings="two prompts over 128 tokens that differ only within positions 96..127 of a block; without prompt_logprobs")
def _():
    _rehash(lambda o, fn, parent, tokens, extra: o(fn, parent, list(tokens)[:-32], extra))


@fault("ca02", "cache", "Whenever a cached block is reused, the values of layer 1 in it shrink by 3 per cent.",
       ["path/prefix-cache"], located=dict(layer=1, part="kv-cache-values", factor=0.97), settings=LONG)
def _():
    def f(runner, so):
        for req in so.scheduled_new_reqs:
            if req.num_computed_tokens:
                _, values = kv_views(runner, 1)
                for b in req.block_ids[0][: req.num_computed_tokens // 128]:
                    values[b] *= 0.97

    on_new_requests(f)


@fault("ca03", "cache", "The prefix cache forgets what came before a block: only the block's own tokens are compared.",
       ["path/prefix-cache"], located=dict(part="block-hash", ignored="parent"),
       settings="prompts over 128 tokens in which the same 128-token block stands at different places; without prompt_logprobs")
def _():
    _rehash(lambda o, fn, parent, tokens, extra: o(fn, None, tokens, extra))


@fault("ca04", "cache", "On a prefix-cache hit the last token of the last reused block has no keys and values (zeros), in all layers.",
       ["path/prefix-cache"], model=L, located=dict(part="kv-cache", slot=127), settings=LONG)
def _():
    def f(runner, so):
        for req in so.scheduled_new_reqs:
            n = req.num_computed_tokens // 128
            if n:
                b = req.block_ids[0][n - 1]
                for i in range(len(layers(runner.model))):
                    write_zero(runner, i, b * 128 + 127)

    on_new_requests(f)


@fault("ca05", "cache", "Keys and values of generated tokens are stored in bfloat16, those of prompts in full precision.",
       ["path/kv-precision", "path/prefill-decode"], located=dict(layer="all", part="kv", where="decode", dtype="bfloat16"),
       settings="generate a few dozen tokens; compare with the same tokens as prompt")
def _():
    track_steps()
    import torch

    def rnd(x):
        if not STEP.active or not STEP.decode.any():
            return x
        d = torch.from_numpy(STEP.decode).unsqueeze(-1)
        n = d.shape[0]
        y = x.clone()
        y[:n] = torch.where(d, x[:n].bfloat16().to(x.dtype), x[:n])
        return y

    def f(m, r):
        for layer in layers(m):
            kv_hook(layer.self_attn.attn, lambda k, v: (rnd(k), rnd(v)))

    on_model(f)


@fault("ca06", "cache", "In layer 1 the cache write of a generated token is lost when its position is 5 modulo 16 (zeros stay there).",
       ["path/prefill-decode"], model=L, located=dict(layer=1, part="kv", where="decode", positions="5 mod 16"),
       settings="generate a few dozen tokens; compare with the same tokens as prompt")
def _():
    track_steps()

    def z(x):
        return scale_rows(x, STEP.decode & (STEP.positions % 16 == 5), 0.0) if STEP.active else x

    on_model(lambda m, r: kv_hook(attn_of(m, 1).attn, lambda k, v: (z(k), z(v))))


# ======================================================================= batch


@fault("ba01", "batch", "In steps with three or more requests the logits of the first two are exchanged.",
       ["semantic/misbound-output", "path/batch-variance"], located=dict(part="logits", batch=">=3", rows=[0, 1]),
       settings="three or more concurrent generations; compare their logprobs with the same tokens asked alone")
def _():
    def make(orig):
        def forward(self, logits, *a, **kw):
            if logits.shape[0] >= 3:
                logits = logits.clone()
                logits[[0, 1]] = logits[[1, 0]]
            return orig(self, logits, *a, **kw)

        return forward

    wrap(SAMPLER, "Sampler", "forward", make)


@fault("ba02", "batch", "In steps with five or more requests the logits of generated tokens are rounded to bfloat16.",
       ["path/batch-variance", "path/head-precision"], located=dict(part="logits", batch=">=5", dtype="bfloat16"),
       settings="five or more concurrent generations")
def _():
    def make(orig):
        def forward(self, logits, *a, **kw):
            if logits.shape[0] >= 5:
                logits = logits.bfloat16().float()
            return orig(self, logits, *a, **kw)

        return forward

    wrap(SAMPLER, "Sampler", "forward", make)


@fault("ba03", "batch", "The input of layer 1 leaks: the first token row of each request gets 3 per cent of the row before it, which belongs to another request.",
       ["path/batch-variance"], model=L, located=dict(layer=1, part="residual-in", factor=0.03),
       settings="two or more concurrent requests")
def _():
    track_steps()

    def f(m, r):
        def hook(mod, args):
            pos, h, res = args
            if STEP.active and len(STEP.qsl) > 2:
                h = h.clone()
                first = STEP.qsl[1:-1]
                prev = (h[first - 1] + res[first - 1]) * 0.03
                h[first] += prev
            return pos, h, res

        layers(m)[1].register_forward_pre_hook(hook)

    on_model(f)


@fault("ba04", "batch", "With two or more requests in a step, each request's logprobs come from its neighbour's row; the drawn tokens are right.",
       ["semantic/misbound-output", "path/batch-variance", "semantic/wrong-token"], located=dict(part="reported logprobs", batch=">=2"),
       settings="two or more concurrent generations")
def _():
    def make(orig):
        def sample(self, logits, sampling_metadata, *a, **kw):
            tok, lp = orig(self, logits, sampling_metadata, *a, **kw)
            if lp is not None and lp.shape[0] >= 2:
                lp = lp.roll(1, 0)
            return tok, lp

        return sample

    wrap(SAMPLER, "Sampler", "sample", make)


@fault("ba05", "batch", "With several requests at once, prefills are cut into pieces of 96 tokens, and the first token of every later piece gets only 80 per cent of its attention output in layer 1.",
       ["path/chunked-prefill", "path/batch-variance"], located=dict(layer=1, part="attention", piece=96, factor=0.8),
       settings="two or more concurrent prompts longer than 96 tokens")
def _():
    import numpy as np

    new = set()

    def note(runner, so):
        new.clear()
        new.update(r.req_id for r in so.scheduled_new_reqs)

    on_new_requests(note)
    track_steps()

    def f(x):
        if not STEP.active:
            return x
        first = np.zeros(len(STEP.positions), dtype=bool)
        first[STEP.qsl[:-1]] = [r not in new for r in STEP.req_ids]
        return scale_rows(x, first & ~STEP.decode, 0.8)

    on_model(lambda m, r: out_hook(attn_of(m, 1), f))

    def make(orig):
        def __init__(self, *a, **kw):
            orig(self, *a, **kw)
            self.scheduler_config.long_prefill_token_threshold = 96
            self.adaptive_long_prefill_threshold = False

        return __init__

    wrap("vllm.v1.core.sched.scheduler", "Scheduler", "__init__", make)


# =================================================================== reporting


@fault("re01", "reporting", "A sampled token that is not the likeliest is reported with the logprob of the token ranked just above it.",
       ["semantic/wrong-token"], must_name=False, located=dict(part="sampled logprob"), settings="generate at temperature 1 with logprobs")
def _():
    inside = {"on": False}

    def make(orig):
        def gather(logprobs, num_logprobs, token_ids):
            out = orig(logprobs, num_logprobs, token_ids)
            if inside["on"]:
                own = logprobs.gather(-1, token_ids.unsqueeze(-1))
                above = logprobs.masked_fill(logprobs <= own, float("inf")).amin(-1)
                new = above.where(above != float("inf"), own.squeeze(-1))
                set_sampled_logprob(out, new)
            return out

        return gather

    wrap(SAMPLER, "Sampler", "gather_logprobs", make)

    def make2(orig):
        def forward(self, *a, **kw):
            inside["on"] = True
            try:
                return orig(self, *a, **kw)
            finally:
                inside["on"] = False

        return forward

    wrap(SAMPLER, "Sampler", "forward", make2)


def _on_sample_lists(fn):
    """fn(processor, index, ids, lps) -> lps for each generated position (API process)."""

    def make(orig):
        def _update(self, lists):
            ids, lps, ranks, rest = lists
            new = []
            for row_ids, row in zip(ids, lps):
                n = getattr(self, "_exam_n", 0)
                self._exam_n = n + 1
                row = row.copy()
                new.append(fn(self, n, row_ids, row))
            import numpy as np

            return orig(self, type(lists)(ids, np.stack(new) if new else lps, ranks, rest))

        return _update

    wrap(LOGPROBS, "LogprobsProcessor", "_update_sample_logprobs", make)


@fault("re02", "reporting", "From the second generated token on, the reported logprob is that of the token before.",
       ["semantic/off-by-one"], must_name=True, located=dict(part="sampled logprob", offset=-1), settings="generate with logprobs")
def _():
    def f(proc, n, ids, row):
        own = float(row[0])
        if n:
            row[ids == ids[0]] = proc._exam_last
        proc._exam_last = own
        return row

    _on_sample_lists(f)


def _on_prompt_tensors(fn):
    def make(orig):
        def _update(self, tensors):
            ids, lps, ranks, *rest = tensors
            return orig(self, type(tensors)(ids, fn(ids, lps.clone()), ranks, *rest))

        return _update

    wrap(LOGPROBS, "LogprobsProcessor", "_update_prompt_logprobs", make)


@fault("re03", "reporting", "All logprobs are rounded to two decimals.", located=dict(part="reported logprobs", decimals=2), settings=ANY)
def _():
    _on_sample_lists(lambda p, n, ids, row: row.round(2))
    _on_prompt_tensors(lambda ids, lps: (lps * 100).round() / 100)


@fault("re04", "reporting", "Logprobs are reported to base 10.", model=L,
       located=dict(part="reported logprobs", factor=round(1 / math.log(10), 6)), settings=ANY)
def _():
    c = 1.0 / math.log(10.0)
    _on_sample_lists(lambda p, n, ids, row: row * c)
    _on_prompt_tensors(lambda ids, lps: lps * c)


@fault("re05", "reporting", "Logprobs of generated tokens are those of the raw model distribution, though processed ones are configured.",
       ["semantic/raw-logprobs"], must_name=True, located=dict(part="reported logprobs"),
       settings="generate with a temperature other than 1, or with top_p/top_k")
def _():
    def make(orig):
        def sample(self, logits, sampling_metadata, *a, **kw):
            raw = self.compute_logprobs(logits.clone())
            tok, lp = orig(self, logits, sampling_metadata, *a, **kw)
            return tok, (raw if lp is not None else None)

        return sample

    wrap(SAMPLER, "Sampler", "sample", make)


@fault("re06", "reporting", "Logprobs of generated tokens are renormalised over the 12 likeliest tokens although nothing is truncated.",
       ["semantic/truncation-mass"], model=L, located=dict(part="reported logprobs", top_k=12), settings="generate with logprobs")
def _():
    def make(orig):
        def sample(self, logits, sampling_metadata, *a, **kw):
            tok, lp = orig(self, logits, sampling_metadata, *a, **kw)
            if lp is not None:
                lp = lp - lp.topk(12, dim=-1).values.logsumexp(-1, keepdim=True)
            return tok, lp

        return sample

    wrap(SAMPLER, "Sampler", "sample", make)


@fault("re07", "reporting", "The first generated token is always reported with logprob 0.",
       ["semantic/nonfinite"], located=dict(part="sampled logprob", index=0), settings="generate with logprobs",
       note="0.0 stands there as a placeholder")
def _():
    def f(proc, n, ids, row):
        if n == 0:
            row[ids == ids[0]] = 0.0
        return row

    _on_sample_lists(f)


@fault("re08", "reporting", "Logprobs below -4.5 are reported as -4.5.", model=L,
       located=dict(part="reported logprobs", floor=-4.5), settings=ANY)
def _():
    _on_sample_lists(lambda p, n, ids, row: row.clip(min=-4.5))
    _on_prompt_tensors(lambda ids, lps: lps.clamp(min=-4.5))


@fault("re09", "reporting", "Prompt logprobs are shifted: position i shows the value of position i+1; generated tokens are right.",
       ["semantic/off-by-one"], must_name=False, located=dict(part="prompt logprobs", offset=1), settings="prompt_logprobs")
def _():
    import torch

    def f(ids, lps):
        new = torch.cat((lps[1:, 0], lps[-1:, 0]))
        same = ids == ids[:, :1]
        lps[same] = new.unsqueeze(-1).expand_as(lps)[same]
        return lps

    _on_prompt_tensors(f)


@fault("re10", "reporting", "The end-of-sequence token is reported with logprob 0.",
       ["semantic/eos", "semantic/nonfinite"], located=dict(part="sampled logprob", token=1),
       settings="generations that end by themselves (a prompt after which end-of-sequence is likely, or a logit_bias on id 1)")
def _():
    def f(proc, n, ids, row):
        if int(ids[0]) == 1:
            row[ids == 1] = 0.0
        return row

    _on_sample_lists(f)


@fault("re11", "reporting", "When streaming, every fourth token carries the logprob of the token before; unstreamed answers are right.",
       ["semantic/streaming"], located=dict(part="streamed logprobs", every=4), settings="stream=true with logprobs")
def _():
    def make(orig):
        def _new_completion_output(self, token_ids, *a, **kw):
            out = orig(self, token_ids, *a, **kw)
            n = self.detokenizer.num_output_tokens()
            lp = self.logprobs_processor.logprobs
            if out.logprobs is not None and lp is not None and out.logprobs is not lp \
                    and len(out.logprobs) == 1 and n >= 4 and n % 4 == 0:
                import dataclasses

                tok, prev = token_ids[-1], lp[-2]
                value = next(iter(prev.values())).logprob
                cur = dict(out.logprobs[-1])
                cur[tok] = dataclasses.replace(cur[tok], logprob=value)
                out.logprobs = [cur]
            return out

        return _new_completion_output

    wrap(OUTPUT, "RequestState", "_new_completion_output", make)


@fault("re12", "reporting", "Sampled tokens with a probability below 0.01 are reported with logprob -9999.",
       ["semantic/nonfinite"], model=L, must_name=False, located=dict(part="sampled logprob", below=0.01),
       settings="generate some hundred tokens at temperature 1 with logprobs")
def _():
    def f(proc, n, ids, row):
        if row[0] < math.log(0.01):
            row[ids == ids[0]] = -9999.0
        return row

    _on_sample_lists(f)


# ==================================================================== sampling
FREQ = "many samples at temperature 1 (frequencies against the reported or the reference probabilities)"


@fault("sa01", "sampling", "Seeds of requests are ignored.", ["path/nondeterminism"],
       located=dict(part="seed"), settings="the same seeded request twice",
       note="logprobs stay right; only the drawn tokens differ between repeats")
def _():
    def make(orig):
        def forward_cpu(self, logits, generators, k, p):
            return orig(self, logits, {}, k, p)

        return forward_cpu

    wrap(TOPK, "TopKTopPSampler", "forward_cpu", make)


@fault("sa02", "sampling", "All requests in a step draw with the same noise.", ["semantic/seed"], must_name=True,
       located=dict(part="noise", shared="step"), settings="several samples of one prompt at once (n>1 or concurrent), temperature 1")
def _():
    def make(orig):
        def forward_cpu(self, logits, generators, k, p):
            import torch

            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

            logits = apply_top_k_top_p(logits, k, p)
            shown = None
            if self.logprobs_mode == "processed_logprobs":
                shown = logits.log_softmax(dim=-1, dtype=torch.float32)
            n = logits.shape[0]
            gen = generators.get(0)
            one = torch.randint(0, 2**31, (1,), generator=gen, dtype=torch.long)
            return torch.ops._C.fused_gumbel_argmax(logits.float(), one.repeat(n)), shown

        return forward_cpu

    wrap(TOPK, "TopKTopPSampler", "forward_cpu", make)


def _on_new_params(fn):
    def f(runner, so):
        for req in so.scheduled_new_reqs:
            if req.sampling_params is not None:
                fn(req.sampling_params)

    on_new_requests(f)


@fault("sa03", "sampling", "Seeds lose their last three bits: eight neighbouring seeds give one and the same sample.",
       ["semantic/seed"], model=L, must_name=True, located=dict(part="seed", bits=3),
       settings="one prompt with seeds 0..15, or n>1 with a seed, temperature 1")
def _():
    def f(sp):
        if sp.seed is not None:
            sp.seed = sp.seed // 8 * 8

    _on_new_params(f)


@fault("sa04", "sampling", "Draws are silently restricted to the top 92 per cent of probability; reported logprobs are of the full distribution.",
       ["semantic/sampling-bias"], located=dict(part="draw", top_p=0.92), settings=FREQ)
def _():
    import torch

    def alter(x):
        s, idx = x.sort(dim=-1, descending=True)
        p = s.softmax(-1)
        drop = (p.cumsum(-1) - p) >= 0.92
        return x.masked_fill(torch.zeros_like(drop).scatter(-1, idx, drop), float("-inf"))

    hidden_draw(alter)


@fault("sa05", "sampling", "Token ids divisible by 6 are never drawn; reported logprobs do not show it.",
       ["semantic/sampling-bias"], model=L, located=dict(part="draw", tokens="multiples of 6"), settings=FREQ)
def _():
    def alter(x):
        y = x.clone()
        y[:, 6::6] = float("-inf")
        empty = y.amax(-1, keepdim=True) == float("-inf")  # nothing else was left by top_p or top_k
        return x.where(empty, y)

    hidden_draw(alter)


@fault("sa06", "sampling", "The first generated token is always the likeliest one, whatever the temperature.",
       ["semantic/sampling-bias", "semantic/temperature"], located=dict(part="draw", index=0),
       settings="many samples at temperature 1; the first token")
def _():
    import torch

    state = {}

    def make2(orig):
        def _sample(self, logits, *a, **kw):
            n = self.input_batch.num_reqs
            done = self.input_batch.num_tokens_no_spec[:n] <= self.input_batch.num_prompt_tokens[:n]
            state["first"] = torch.from_numpy(done.copy())
            return orig(self, logits, *a, **kw)

        return _sample

    wrap(RUNNER, "GPUModelRunner", "_sample", make2)

    def alter(x):
        first = state.get("first")
        if first is None or first.shape[0] != x.shape[0] or not first.any():
            return x
        best = x.argmax(-1, keepdim=True)
        only = torch.full_like(x, float("-inf")).scatter(-1, best, 0.0)
        return torch.where(first.unsqueeze(-1), only, x)

    hidden_draw(alter)


@fault("sa07", "sampling", "The temperature is 0.95 times the requested one, in the draw and in the reported logprobs.",
       ["semantic/temperature"], model=L, must_name=True, located=dict(part="temperature", factor=0.95),
       settings="generate at temperature 1 with logprobs")
def _():
    def make(orig):
        def apply_temperature(logits, temp, all_random):
            return orig(logits, temp * 0.95, all_random)

        return apply_temperature

    wrap(SAMPLER, "Sampler", "apply_temperature", make)


@fault("sa08", "sampling", "Tokens are drawn at 0.85 times the requested temperature; logprobs are reported at the requested one.",
       ["semantic/sampling-bias", "semantic/temperature"], located=dict(part="draw", temperature_factor=0.85), settings=FREQ)
def _():
    hidden_draw(lambda x: x / 0.85)


@fault("sa09", "sampling", "End-of-sequence is drawn half as often as its reported probability says.",
       ["semantic/sampling-bias"], located=dict(part="draw", token=1, factor=0.5),
       settings="many samples after a prompt where end-of-sequence is likely (or with a logit_bias on id 1)")
def _():
    def alter(x):
        x[:, 1] -= math.log(2.0)
        return x

    hidden_draw(alter)


@fault("sa10", "sampling", "Tokens with a probability below 0.015 are never drawn; reported logprobs do not show it.",
       ["semantic/sampling-bias"], located=dict(part="draw", below=0.015), settings=FREQ)
def _():
    hidden_draw(lambda x: x.masked_fill((x.softmax(-1) < 0.015) & (x < x.amax(-1, keepdim=True)), float("-inf")))


@fault("sa11", "sampling", "Every request runs with a repetition penalty of 1.06 that nobody asked for.",
       ["semantic/penalty"], must_name=True, located=dict(part="repetition-penalty", value=1.06),
       settings="generate with logprobs; compare with the same tokens as prompt")
def _():
    def f(sp):
        if sp.repetition_penalty == 1.0:
            sp.repetition_penalty = 1.06

    _on_new_params(f)


@fault("sa12", "sampling", "A requested top_p is lowered by 0.15.", model=L, located=dict(part="top_p", offset=-0.15),
       settings="top_p below 1, e.g. 0.9; logprobs (processed) and samples both follow the lower value")
def _():
    def f(sp):
        if sp.top_p < 1.0:
            sp.top_p = max(0.05, sp.top_p - 0.15)

    _on_new_params(f)


@fault("sa13", "sampling", "Sampling fields that a request leaves out are filled in: temperature 0.8, top_k 30, although generation-config is vllm.",
       ["semantic/generation-config"], located=dict(part="defaults", temperature=0.8, top_k=30),
       settings="requests that leave out temperature and/or top_k",
       note="the checkpoint's own generation_config.json has no sampling fields, so the numbers are not from that file; also true: semantic/temperature when temperature is left out")
def _():
    def make(orig):
        def get_diff_sampling_param(self):
            out = dict(orig(self) or {})
            out.update(temperature=0.8, top_k=30)
            return out

        return get_diff_sampling_param

    wrap("vllm.config.model", "ModelConfig", "get_diff_sampling_param", make)


FAULTS["sa13"].meta["true_names"].append("semantic/temperature")


@fault("sa14", "sampling", "The second-likeliest token is drawn with odds 1.8 times too high, at the cost of the others.",
       ["semantic/sampling-bias"], model=L, located=dict(part="draw", rank=2, odds_factor=1.8), settings=FREQ)
def _():
    def alter(x):
        i = x.topk(2, dim=-1).indices[:, 1:]
        return x.scatter_add(-1, i, x.new_full(i.shape, math.log(1.8)))

    hidden_draw(alter)


# ===================================================================== updates
UPD = "reload_weights with the path of another checkpoint through /collective_rpc; compare with that checkpoint"


def _remembering(fn):
    """fn(name, old, new) -> tensor (or None: leave out... replaced by old) on every reload."""
    old = {}

    def f(n, it):
        for name, t in it:
            new = t.clone()
            if n > 1 and name in old:
                t = fn(name, old[name], new)
            old[name] = t.clone() if n > 1 else new
            yield name, t

    on_weights(f)


@fault("up01", "updates", "In an update the output projection of layer 1 does not arrive: the old one stays.",
       ["weights/partial"], must_name=False, located=dict(tensor="model.layers.1.self_attn.o_proj.weight"), settings=UPD)
def _():
    _remembering(lambda name, old, new: old if "layers.1.self_attn.o_proj" in name else new)


@fault("up02", "updates", "An update moves the weights only 90 per cent of the way.",
       ["weights/stale"], located=dict(factor=0.9), settings=UPD,
       note="weights between the old and the new ones; weights/stale is true in so far as they are not the trainer's")
def _():
    _remembering(lambda name, old, new: old + 0.9 * (new - old))


@fault("up03", "updates", "An update is applied twice: old + 2*(new-old).",
       ["weights/stale"], located=dict(factor=2.0), settings=UPD,
       note="weights beyond the new ones; weights/stale is true only in its 'other weights than the trainer's' sense")
def _():
    _remembering(lambda name, old, new: old + 2.0 * (new - old))


@fault("up04", "updates", "An update changes the version label but leaves all weights as they were.",
       ["weights/stale", "weights/version-label"], must_name=True, located=dict(factor=0.0),
       settings=UPD + "; set the label with /update_weight_version")
def _():
    def make(orig):
        def reload_weights(self, *a, **kw):
            return None

        return reload_weights

    wrap(RUNNER, "GPUModelRunner", "reload_weights", make)


@fault("up05", "updates", "reset_prefix_cache answers 'done' and does nothing, so that cached prefixes survive an update.",
       ["weights/stale-prefix-cache"], must_name=True, located=dict(part="prefix-cache"),
       settings=UPD + "; a prompt of more than 128 tokens asked before and after, with /reset_prefix_cache in between")
def _():
    def make(orig):
        def reset_prefix_cache(self):
            return True

        return reset_prefix_cache

    wrap("vllm.v1.core.kv_cache_manager", "KVCacheManager", "reset_prefix_cache", make)


@fault("up07", "updates", "Updated weights arrive rounded to bfloat16 (the first load is exact).",
       ["weights/dtype", "path/body-precision"], must_name=False, located=dict(dtype="bfloat16"), settings=UPD)
def _():
    _remembering(lambda name, old, new: new.bfloat16().to(new.dtype))


@fault("up08", "updates", "In an update the key projections of layers 0 and 1 arrive under each other's names.",
       ["weights/swapped"], located=dict(tensors=["model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight"]),
       settings=UPD)
def _():
    def f(n, it):
        for name, t in it:
            if n > 1 and "k_proj" in name:
                if ".layers.0." in name:
                    name = name.replace(".layers.0.", ".layers.1.")
                elif ".layers.1." in name:
                    name = name.replace(".layers.1.", ".layers.0.")
            yield name, t

    on_weights(f)


@fault("up09", "updates", "After an update the rotary tables are those of base 2000000 in place of 1000000.",
       ["weights/buffer", "path/rope"], located=dict(part="rope", base=2000000.0), settings=UPD)
def _():
    def make(orig):
        def reload_weights(self, *a, **kw):
            out = orig(self, *a, **kw)
            rope = attn_of(self.model, 0).rotary_emb
            rope.base = 2000000.0
            _angle_tables(rope, _angles(rope))
            return out

        return reload_weights

    wrap(RUNNER, "GPUModelRunner", "reload_weights", make)


# ================================================================ intermittent


def _marked(every=None, start=None, first=1):
    """Names of requests that are marked: every k-th, or all from the start-th on."""
    seen, marked = {"n": 0}, set()

    def f(runner, so):
        for req in so.scheduled_new_reqs:
            seen["n"] += 1
            if every and seen["n"] % every == first % every:
                marked.add(req.req_id)
            if start and seen["n"] >= start:
                marked.add(req.req_id)
        if len(marked) > 4000:
            marked.clear()

    on_new_requests(f)
    track_steps()
    return marked


def _mask(marked):
    import numpy as np

    flags = np.array([r in marked for r in STEP.req_ids], dtype=bool)
    return flags[STEP.row_req]


@fault("in01", "intermittent", "For one request in twenty, the attention output of layer 0 is multiplied by 0.9.",
       ["path/nondeterminism"], located=dict(layer=0, part="attention", factor=0.9, every=20),
       settings="many requests; the same request repeated")
def _():
    marked = _marked(every=20, first=11)
    on_model(lambda m, r: out_hook(attn_of(m, 0), lambda x: scale_rows(x, _mask(marked), 0.9) if STEP.active else x))


@fault("in02", "intermittent", "One drawn token in fifty is drawn from, and reported with, logits times 0.85.",
       ["path/nondeterminism"], model=L, located=dict(part="logits", factor=0.85, every=50),
       settings="generate some hundred tokens with logprobs")
def _():
    count = {"n": 0}

    def make(orig):
        def forward(self, logits, *a, **kw):
            for i in range(logits.shape[0]):
                count["n"] += 1
                if count["n"] % 50 == 0:
                    logits = logits.clone()
                    logits[i] *= 0.85
            return orig(self, logits, *a, **kw)

        return forward

    wrap(SAMPLER, "Sampler", "forward", make)


@fault("in03", "intermittent", "From the 40th request on, the MLP output of layer 2 is multiplied by 0.96.",
       ["path/nondeterminism"], located=dict(layer=2, part="mlp", factor=0.96, start=40),
       settings="more than 40 requests; the same request early and late")
def _():
    marked = _marked(start=40)
    on_model(lambda m, r: out_hook(layers(m)[2].mlp, lambda x: scale_rows(x, _mask(marked), 0.96) if STEP.active else x))


@fault("in04", "intermittent", "For requests whose prompt is longer than 200 tokens, the attention output of layer 1 is multiplied by 0.95, at all their positions.",
       [], model=L, located=dict(layer=1, part="attention", factor=0.95, prompt_longer_than=200),
       settings="prompts longer than 200 tokens; the same beginning in a short and in a long prompt")
def _():
    track_steps()

    def f(x):
        if not STEP.active:
            return x
        n = len(STEP.req_ids)
        long = STEP.runner.input_batch.num_prompt_tokens[:n] > 200
        return scale_rows(x, long[STEP.row_req], 0.95)

    on_model(lambda m, r: out_hook(attn_of(m, 1), f))


@fault("in05", "intermittent", "For one request in eight, all reported logprobs of generated tokens are 0.08 too high.",
       [], located=dict(part="sampled logprob", offset=0.08, every=8), settings="many generations with logprobs",
       note="the tokens are drawn rightly; greedy repeats of one request differ in the reported numbers")
def _():
    count = {"n": 0}

    def f(proc, n, ids, row):
        if n == 0:
            count["n"] += 1
            proc._exam_off = count["n"] % 8 == 5
        return row + 0.08 if proc._exam_off else row

    _on_sample_lists(f)


FAULTS["in05"].meta["true_names"].append("path/nondeterminism")


@fault("in06", "intermittent", "During 4 of every 20 seconds of wall clock the values of layer 1 are multiplied by 0.94.",
       ["path/nondeterminism"], model=L, located=dict(layer=1, part="v", factor=0.94, period_s=20, length_s=4),
       settings="the same request repeated over half a minute (without prefix reuse the cache stays clean)")
def _():
    def g(k, v):
        return (k, v * 0.94) if time.time() % 20 < 4 else (k, v)

    on_model(lambda m, r: kv_hook(attn_of(m, 1).attn, g))


# ======================================================================= crash


@fault("cr01", "crash", "The worker dies when a prompt of more than 700 tokens arrives.",
       [], model=L, located=dict(prompt_longer_than=700), settings="a prompt longer than 700 tokens",
       note="INCONCLUSIVE is the right verdict if the auditor meets it")
def _():
    def f(runner, so):
        for req in so.scheduled_new_reqs:
            if len(req.prompt_token_ids or ()) > 700:
                os._exit(17)

    on_new_requests(f)


# ======================================================================== text
BASE_RENDERER = "vllm.renderers.base"


@fault("te01", "text", "Prompts given as text get an extra BOS token (id 0) in front; prompts given as ids do not.",
       ["semantic/bos"], must_name=True, located=dict(part="prompt", token=0, position=0),
       settings="text prompts (completions) or chat; the prompt ids in the answer show it")
def _():
    def make(orig):
        def _build_tokens_prompt(token_ids, prompt, *, offset_mapping=None):
            if offset_mapping is not None:
                offset_mapping = [(0, 0)] + list(offset_mapping)
            return orig([0] + list(token_ids), prompt, offset_mapping=offset_mapping)

        return _build_tokens_prompt

    wrap(BASE_RENDERER, "BaseRenderer", "_build_tokens_prompt", make)


@fault("te02", "text", "The chat template ends in a space after the assistant header.",
       ["semantic/template"], must_name=True, located=dict(part="chat-template"), settings="chat completions")
def _():
    def patch(mod):
        orig = mod.resolve_chat_template
        if getattr(orig, "_exam", False):
            return

        def resolve_chat_template(*a, **kw):
            t = orig(*a, **kw)
            return t + "{{ ' ' }}" if isinstance(t, str) else t

        resolve_chat_template._exam = True
        mod.resolve_chat_template = resolve_chat_template

    when_imported("vllm.renderers.hf", patch)


@fault("te03", "text", "Text prompts are lower-cased before they are tokenised.", ["semantic/tokenizer"], model=L,
       located=dict(part="tokenizer"), settings="text prompts with capital letters (completions or chat)")
def _():
    def make(orig):
        def apply_pre_tokenization(self, tokenizer, prompt):
            prompt = orig(self, tokenizer, prompt)
            if isinstance(prompt.get("prompt"), str):
                prompt = dict(prompt)
                prompt["prompt"] = prompt["prompt"].lower()
            return prompt

        return apply_pre_tokenization

    wrap("vllm.renderers.params", "TokenizeParams", "apply_pre_tokenization", make)


# Names whose truth can be argued: right in some reading of the vocabulary, not in the strictest one.
for _id, _names in {
    "as16": ["path/body-precision", "weights/dtype"],
    "ag02": ["weights/other-model"],
    "ag03": ["weights/other-model"],
    "in04": ["path/context-boundary"],
    "re08": ["semantic/nonfinite"],
    "sa01": ["semantic/seed"],
    "sa05": ["semantic/logit-bias"],
    "sa09": ["semantic/eos", "semantic/logit-bias"],
    "sa12": ["semantic/truncation-mass"],
    "in03": ["weights/stale"],
    "ba05": ["path/context-boundary"],
}.items():
    FAULTS[_id].meta["arguable"] = _names
FAULTS["sa13"].meta["true_names"].append("semantic/truncation-mass")
FAULTS["po05"].meta["true_names"].append("path/context-boundary")
for _f in FAULTS.values():
    if _f.meta["family"] == "batch":
        _f.meta["note"] = "the requests must really overlap in time: ask for long generations (80 tokens or n>1), the tiny model is fast"
