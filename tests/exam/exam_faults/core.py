"""Plumbing: post-import patching, hooks on the loaded model, per-step row information."""
import functools
import importlib.abc
import importlib.util
import sys

import numpy as np

RUNNER = "vllm.v1.worker.gpu_model_runner"
CPU_RUNNER = "vllm.v1.worker.cpu_model_runner"
SAMPLER = "vllm.v1.sample.sampler"
TOPK = "vllm.v1.sample.ops.topk_topp_sampler"
LOGPROBS = "vllm.v1.engine.logprobs"
OUTPUT = "vllm.v1.engine.output_processor"
KVUTILS = "vllm.v1.core.kv_cache_utils"

_waiting = {}


class _Finder(importlib.abc.MetaPathFinder):
    busy = set()

    def find_spec(self, name, path, target=None):
        if name not in _waiting or name in self.busy:
            return None
        self.busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.busy.discard(name)
        if spec is None or spec.loader is None:
            return None
        inner = spec.loader.exec_module

        def exec_module(module):
            inner(module)
            for fn in _waiting.pop(name, []):
                fn(module)

        spec.loader.exec_module = exec_module
        return spec


def when_imported(name, fn):
    """Run fn(module) now if the module is there, otherwise right after its import."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and not getattr(spec, "_initializing", False):
        fn(module)
        return
    _waiting.setdefault(name, []).append(fn)
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def wrap(module_name, class_name, method, make):
    """Replace class.method by make(original); a static method stays static."""

    def patch(module):
        cls = getattr(module, class_name)
        raw = cls.__dict__.get(method)
        if raw is None:  # inherited
            raw = getattr(cls, method)
        static = isinstance(raw, staticmethod)
        orig = raw.__func__ if static else raw
        if getattr(orig, "_exam", False):
            return
        new = functools.wraps(orig)(make(orig))
        new._exam = True
        setattr(cls, method, staticmethod(new) if static else new)

    when_imported(module_name, patch)


# ------------------------------------------------------------------ the model
def on_model(fn):
    """fn(model, runner) once the weights are loaded (worker process)."""

    def make(orig):
        def load_model(self, *a, **kw):
            out = orig(self, *a, **kw)
            fn(self.model, self)
            return out

        return load_model

    wrap(CPU_RUNNER, "CPUModelRunner", "load_model", make)


def layers(model):
    return model.model.layers


def attn_of(model, i):
    return layers(model)[i].self_attn


def out_hook(module, fn):
    """fn(tensor) on the (first) output of a module."""

    def hook(mod, args, out):
        if isinstance(out, tuple):
            return (fn(out[0]),) + tuple(out[1:])
        return fn(out)

    module.register_forward_hook(hook)


def in_hook(module, fn):
    """fn(tensor) on the first positional input of a module."""

    def hook(mod, args):
        return (fn(args[0]),) + tuple(args[1:])

    module.register_forward_pre_hook(hook)


def kv_hook(attn, fn):
    """fn(k, v) -> k, v just before they are written to the cache and attended to."""

    def hook(mod, args):
        q, k, v = args[:3]
        k, v = fn(k, v)
        return (q, k, v) + tuple(args[3:])

    attn.register_forward_pre_hook(hook)


# ------------------------------------------------- which token rows are which
class Step:
    active = False
    runner = None
    qsl = None
    req_ids = ()
    positions = None
    row_req = None
    decode = None


STEP = Step()


def track_steps(before=None):
    """Keep STEP up to date during real forwards; before(runner, kwargs) may edit kwargs."""

    def make(orig):
        def _model_forward(self, *a, **kw):
            n = self.input_batch.num_reqs
            qsl = self.query_start_loc.np[: n + 1].copy()
            total = int(qsl[-1])
            STEP.runner = self
            STEP.qsl = qsl
            STEP.req_ids = list(self.input_batch.req_ids[:n])
            STEP.row_req = np.repeat(np.arange(n), np.diff(qsl))
            done = self.input_batch.num_computed_tokens_cpu[:n]
            pos = done[STEP.row_req] + (np.arange(total) - qsl[:-1][STEP.row_req])
            STEP.positions = pos
            STEP.decode = pos >= self.input_batch.num_prompt_tokens[:n][STEP.row_req]
            STEP.active = True
            try:
                if before is not None:
                    before(self, kw)
                return orig(self, *a, **kw)
            finally:
                STEP.active = False

        return _model_forward

    wrap(RUNNER, "GPUModelRunner", "_model_forward", make)


def rows_mask(mask):
    """A bool column for the token rows, or None outside a real step."""
    import torch

    if not STEP.active or not mask.any():
        return None
    return torch.from_numpy(np.ascontiguousarray(mask)).unsqueeze(-1)


def scale_rows(x, mask, factor):
    m = rows_mask(mask) if STEP.active else None
    if m is None or m.shape[0] > x.shape[0]:
        return x
    x = x.clone()
    n = m.shape[0]
    x[:n] = x[:n] * (1.0 + (factor - 1.0) * m.to(x.dtype))
    return x


def on_new_requests(fn):
    """fn(runner, scheduler_output) at the start of every engine step in the worker."""

    def make(orig):
        def execute_model(self, scheduler_output, *a, **kw):
            import torch

            with torch.inference_mode():
                fn(self, scheduler_output)
            return orig(self, scheduler_output, *a, **kw)

        return execute_model

    wrap(RUNNER, "GPUModelRunner", "execute_model", make)


def kv_views(runner, layer):
    """(keys, values) of one layer as [block, kv_head, slot-ish, head_dim] views."""
    cache = attn_of(runner.model, layer).attn.kv_cache
    if isinstance(cache, (list, tuple)):
        cache = cache[0]
    nb, nh, bs, _ = cache.shape
    return cache.view(nb, nh, bs * 2, -1).chunk(2, dim=2)


def write_zero(runner, layer, slot):
    """Zero keys and values in one cache slot, through the backend's own write."""
    import torch

    a = attn_of(runner.model, layer).attn
    cache = a.kv_cache[0] if isinstance(a.kv_cache, (list, tuple)) else a.kv_cache
    z = torch.zeros(1, a.num_kv_heads, a.head_size, dtype=cache.dtype)
    a.impl.do_kv_cache_update(a, z, z.clone(), cache, torch.tensor([slot], dtype=torch.int64))


# ----------------------------------------------------------------- the weights
def on_weights(fn):
    """Every (name, tensor) stream into load_weights passes through fn(call_no, iterator)."""
    calls = {"n": 0}

    def make(orig):
        def load_weights(self, weights):
            calls["n"] += 1
            return orig(self, fn(calls["n"], weights))

        return load_weights

    wrap("vllm.model_executor.models.qwen3", "Qwen3ForCausalLM", "load_weights", make)
    wrap("vllm.model_executor.models.llama", "LlamaForCausalLM", "load_weights", make)


# ------------------------------------------------------------------ the logprobs
def on_sampler_output(fn):
    """fn(out, sampling_metadata) on the SamplerOutput of every step."""

    def make(orig):
        def forward(self, logits, sampling_metadata, *a, **kw):
            return fn(orig(self, logits, sampling_metadata, *a, **kw), sampling_metadata)

        return forward

    wrap(SAMPLER, "Sampler", "forward", make)


def set_sampled_logprob(tensors, new):
    """Put new values at the sampled token, also where it shows up among the top ones."""
    ids, lps = tensors.logprob_token_ids, tensors.logprobs
    same = ids == ids[:, :1]
    lps[same] = new.unsqueeze(-1).expand_as(lps)[same]


def hidden_draw(alter):
    """Draw from alter(logits) while the reported logprobs stay those of logits."""

    def make(orig):
        def forward_cpu(self, logits, generators, k, p):
            import torch

            from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

            logits = apply_top_k_top_p(logits, k, p)
            shown = None
            if self.logprobs_mode == "processed_logprobs":
                shown = logits.log_softmax(dim=-1, dtype=torch.float32)
            drawn, _ = orig(self, alter(logits.clone()), generators, None, None)
            return drawn, shown

        return forward_cpu

    wrap(TOPK, "TopKTopPSampler", "forward_cpu", make)
