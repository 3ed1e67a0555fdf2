"""A block's kernels for Hopper, made by Inductor and Triton on a machine without a GPU.

Runs where triton is installed, beside a torch built for CUDA: it answers what the compiler asks of
the device, which is not there.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from fake_cuda import CUDA, cut
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from dzrobot.policies.dreamzero.network.attention import CachedAttention
from dzrobot.policies.dreamzero.network.layers import Block, Conditioning, ContextKV, Rope

triton = pytest.importorskip("triton", reason="triton is not installed")
if not torch.backends.cuda.is_built():
    pytest.skip("this torch is not built for CUDA", allow_module_level=True)

HOPPER = SimpleNamespace(
    name="H100", major=9, minor=0, multi_processor_count=132, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    total_memory=80 * 2**30, L2_cache_size=50 * 2**20, shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
)  # fmt: skip


class Driver:
    """What Triton asks of the driver before anything is launched."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0


@pytest.fixture
def kernels(monkeypatch):
    """Return the Triton kernels by name, filled as they are compiled."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import _load_triton_kernel_from_source
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties

    made = {}

    def compiled(self, name, source, device_str="cuda"):
        kernel = made[name] = _load_triton_kernel_from_source(name, source)
        kernel.precompile(warm_cache_only=True)
        return kernel

    device = DeviceProperties(
        type="cuda", index=0, cc=90, major=9, warp_size=32,
        **{
            name: getattr(HOPPER, name)
            for name in (
                "multi_processor_count", "regs_per_multiprocessor",
                "max_threads_per_multi_processor", "max_threads_per_block",
            )
        },
    )  # fmt: skip
    answers = {
        AsyncCompile: {"triton": compiled},
        triton_helpers: {"set_driver_to_gpu": lambda: None},
        DeviceProperties: {"create": lambda device_: device},
        torch.cuda: {
            "get_device_properties": lambda *_: HOPPER,
            "get_device_capability": lambda *_: (9, 0),
            "current_device": lambda: 0,
        },
        CudaInterface: {
            "is_available": lambda: True,
            "is_bf16_supported": lambda *_, **__: True,
            "raise_if_triton_unavailable": lambda *_: None,
            "get_device_properties": lambda *_: HOPPER,
            "get_compute_capability": lambda *_: 90,
        },
        CudaInterface.Worker: {
            "get_device_properties": lambda *_: HOPPER,
            "current_device": lambda: 0,
        },
    }
    for owner, own in answers.items():
        for name, answer in own.items():
            plain = name == "triton" or not isinstance(owner, type)
            monkeypatch.setattr(owner, name, answer if plain else staticmethod(answer))
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return made


@pytest.mark.parametrize("name", ["5b", "14b"])
def test_the_kernels_between_a_blocks_products_compile_for_hopper(name, kernels):
    from torch._inductor import compile_fx, config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    dit = cut(name).dit
    rows, tokens, past = 2, 124, 50
    with torch.device("meta"):
        block = Block(dit)

    def run(weights, x, time, rope, context, cache):
        attention = CachedAttention(*cache, past, ((1, tokens),))
        given = Conditioning(time, Rope(*rope), ContextKV(*context, None))
        return torch.func.functional_call(block, weights, (x, given, attention))

    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(torch.no_grad())

        def made(*shape, dtype=torch.bfloat16):
            return torch.empty(*shape, dtype=dtype, device=CUDA)

        def heads(count):
            return made(rows, count, dit.num_heads, dit.head_dim)

        angles = (tokens, 1, dit.head_dim // 2)
        flat, form = tree_flatten(
            (
                {key: made(*weight.shape) for key, weight in block.named_parameters()},
                made(rows, tokens, dit.dim),
                made(rows, 1, 6, dit.dim),
                [made(*angles, dtype=torch.float32) for _ in range(2)],
                [heads(128), heads(128), heads(257), heads(257)],
                [heads(past + tokens) for _ in range(2)],
            )
        )
        graph = make_fx(
            lambda *leaves: (run(*tree_unflatten(list(leaves), form)),),
            decomposition_table=select_decomp_table(),
        )(*flat)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        stack.enter_context(V.set_fake_mode(mode))
        stack.enter_context(
            config.patch(
                compile_threads=1, force_disable_caches=True, use_static_cuda_launcher=False
            )
        )
        compile_fx.compile_fx_inner(graph, flat)
    assert any("_red_" in kernel or "_per_" in kernel for kernel in kernels)
    assert any("_poi_" in kernel for kernel in kernels)
    for kernel in kernels.values():
        for result in kernel.compile_results:
            assert ".target sm_90a" in result.kernel.asm["ptx"]
            assert result.kernel.asm["cubin"]
