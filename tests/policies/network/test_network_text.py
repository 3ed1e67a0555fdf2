"""Prompt embeddings: exact savings, masks, cache and tokenizer."""

import copy
import os
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dzrobot.errors import CheckpointError
from dzrobot.policies.dreamzero.bundled import default_checkpoint
from dzrobot.policies.dreamzero.checkpoints.directory import TOKENIZER_FOLDER
from dzrobot.policies.dreamzero.network.config import TextConfig
from dzrobot.policies.dreamzero.network.prompt import (
    PromptCache,
    PromptEmbedding,
    PromptFiles,
    PromptTokenizer,
    TextEncoder,
    clean,
)

LENGTHS = (19, 8, 1, 40)


CONFIG = TextConfig(vocab=90, dim=16, dim_attn=16, dim_ffn=24, num_heads=4, num_layers=2)
WHOLE_NUMBERS = (torch.int16, torch.int32, torch.int64)


@pytest.fixture(scope="module")
def encoder():
    torch.manual_seed(0)
    return TextEncoder(CONFIG).eval().requires_grad_(requires_grad=False)


@pytest.fixture(scope="module")
def prompts():
    ids = torch.randint(2, 90, (len(LENGTHS), 40), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(40) < torch.tensor(LENGTHS)[:, None]).long()
    return ids * mask, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_length_equals_padded(encoder, prompts, dtype):
    encoder = copy.deepcopy(encoder).to(dtype)
    ids, mask = prompts
    for count in range(1, len(ids)):
        full = encoder.stack(ids[:count], mask[:count].bool())
        embedded = encoder(ids[:count], mask[:count])
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            embedded, full * mask[:count, :, None].to(dtype), rtol=tolerance, atol=tolerance
        )
        assert embedded.dtype == dtype


def test_each_prompt_is_masked_by_its_own_length(encoder, prompts):
    ids, mask = prompts
    embedded = encoder(ids, mask)
    for row, length in zip(embedded, LENGTHS, strict=True):
        assert not row[length:].any()
        assert row[:length].abs().amin(dim=0).max() > 0
    alone = torch.cat([encoder(ids[i : i + 1], mask[i : i + 1]) for i in range(len(ids))])
    torch.testing.assert_close(embedded, alone, rtol=1e-5, atol=1e-6)


def test_cut_prompts_end_where_the_shortest_does(encoder, prompts):
    """The published rule: for each length v of the batch, ``prompt_emb[:, v:] = 0``."""
    rows = encoder(*prompts)
    wanted = rows.clone()
    for length in LENGTHS[:2]:
        wanted[:2, length:] = 0
    found = PromptEmbedding(rows[:2], LENGTHS[:2]).cut()
    assert torch.equal(found.rows_BNE, wanted[:2])
    assert found.lengths == (8, 8)
    assert rows[0, 8:19].any()


def test_cache_is_exact_whatever_comes_together(encoder, prompts):
    ids, mask = prompts
    cache, other = PromptCache(), PromptCache()
    together = cache.embed(lambda: encoder, ids, mask)
    again = torch.cat(
        [other.embed(lambda: encoder, ids[i : i + 1], mask[i : i + 1]) for i in (3, 2, 1, 0)]
    )

    assert torch.equal(together, again.flip(0))
    assert torch.equal(cache.embed(lambda: encoder, ids[[1, 1]], mask[[1, 1]]), together[[1, 1]])
    assert len(cache) == len(ids)


def test_cache_runs_the_encoder_once_per_prompt_and_forgets_the_oldest(encoder, prompts):
    ids, mask = prompts
    runs = []
    hook = encoder.register_forward_hook(lambda *_: runs.append(1))
    cache = PromptCache(capacity=2)
    for i in (0, 1, 0, 2, 0, 1):
        cache.embed(lambda: encoder, ids[i : i + 1], mask[i : i + 1])
    hook.remove()
    # 0 and 1 are new; 2 pushes out 1, which is then new again.
    assert len(runs) == 4
    assert len(cache) == 2


def test_cached_rows_can_be_trained_on_after_inference(encoder, prompts):
    ids, mask = prompts
    cache = PromptCache()
    with torch.inference_mode():
        cache.embed(lambda: encoder, ids, mask)
    weight = torch.ones(16, 3, requires_grad=True)
    (cache.embed(lambda: encoder, ids, mask) @ weight).sum().backward()
    assert weight.grad.any()


def files_of(folder, encoder, weights="weights"):
    return PromptFiles(
        folder=folder, weights=weights, hash_weights=lambda: weights, config=CONFIG,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


class Counted:
    """Hands out an encoder and counts how often it was asked for."""

    def __init__(self, encoder):
        self.encoder, self.asked = encoder, 0

    def __call__(self):
        self.asked += 1
        return self.encoder


def test_an_embedding_is_computed_once_on_a_machine(encoder, prompts, tmp_path):
    first, second = Counted(encoder), Counted(encoder)
    made = PromptCache(files=files_of(tmp_path, encoder)).embed(first, *prompts)
    cache = PromptCache(files=files_of(tmp_path, encoder))
    assert cache.knows(*prompts)
    assert torch.equal(cache.embed(second, *prompts), made)
    assert torch.equal(PromptCache().embed(lambda: encoder, *prompts), made)
    assert (first.asked, second.asked) == (len(LENGTHS), 0)
    assert len(list(tmp_path.iterdir())) == len(LENGTHS)


@pytest.mark.parametrize("change", ["cut", "bit", "renamed", "empty", "folder", "pipe"])
def test_a_file_that_is_not_what_was_written_is_not_used(encoder, prompts, tmp_path, change):
    ids, mask = (x[:2] for x in prompts)
    made = PromptCache(files=files_of(tmp_path, encoder)).embed(lambda: encoder, ids, mask)
    whole = {path: path.read_bytes() for path in sorted(tmp_path.iterdir())}
    for path, other in zip(whole, reversed(whole.values()), strict=True):
        content = bytearray(whole[path])
        match change:
            case "cut":
                path.write_bytes(content[:-4])
            case "bit":
                content[-1] ^= 1
                path.write_bytes(content)
            case "renamed":
                path.write_bytes(other)
            case "empty":
                path.write_bytes(b"")
            case "folder":
                path.unlink()
                path.mkdir()
            case "pipe":
                path.unlink()
                os.mkfifo(path)
    counted, cache = Counted(encoder), PromptCache(files=files_of(tmp_path, encoder))
    assert not cache.knows(ids, mask)
    assert torch.equal(cache.embed(counted, ids, mask), made)
    assert counted.asked == 2


@pytest.mark.parametrize(
    "other",
    [
        {"weights": "other weights"},
        {"config": replace(CONFIG, num_buckets=16)},
        {"dtype": torch.bfloat16},
        {"weights": ""},
    ],
)
def test_another_encoder_finds_nothing(encoder, prompts, tmp_path, other):
    files = files_of(tmp_path, encoder)
    PromptCache(files=files).embed(lambda: encoder, *prompts)
    assert not PromptCache(files=replace(files, **other)).knows(*prompts)


def test_weights_are_not_read_for_a_hash_that_serves_nothing(encoder, prompts, tmp_path):
    """Neither to look for an embedding, nor where none can be kept."""
    reads = []

    def hash_weights():
        reads.append(True)
        return ""

    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        files = replace(files_of(folder, encoder), weights="", hash_weights=hash_weights)
        made = PromptCache(files=files).embed(lambda: encoder, *prompts)
        assert torch.equal(made, PromptCache().embed(lambda: encoder, *prompts))
    # Of the folder that can be made, once for each prompt that could be kept there.
    assert len(reads) == len(LENGTHS)


def test_a_file_holds_neither_text_nor_tokens(encoder, tmp_path, tokenizer_folder):
    ids, mask = PromptTokenizer(tokenizer_folder, text_len=8)(["pick cup"])
    PromptCache(files=files_of(tmp_path, encoder)).embed(lambda: encoder, ids, mask)
    (path,) = tmp_path.iterdir()
    length = int(mask.sum())
    assert path.stat().st_size == 32 + length * CONFIG.dim * 4
    content = path.read_bytes() + path.name.encode()
    tokens = ids[0, :length]
    assert all(
        hidden not in content
        for hidden in (b"pick", b"cup", *(tokens.to(t).numpy().tobytes() for t in WHOLE_NUMBERS))
    )


def test_processes_that_write_the_same_prompts_leave_whole_files(encoder, prompts, tmp_path):
    made = PromptCache().embed(lambda: encoder, *prompts)
    keys = [tuple(range(length)) for length in LENGTHS]

    def work():
        files = files_of(tmp_path, encoder)
        for _ in range(20):
            for key, rows in zip(keys, made, strict=True):
                files.keep(key, rows[: len(key)])
                assert torch.equal(files.find(key), rows[: len(key)])

    processes = [get_context("fork").Process(target=work) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(list(tmp_path.iterdir())) == len(keys)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    words = {word: i for i, word in enumerate(["<pad>", "<unk>", "pick", "&", "cup"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def test_tokenizer_cleans_pads_and_cuts(tokenizer_folder):
    ids, mask = PromptTokenizer(tokenizer_folder, text_len=4)(
        [" pick \n &amp;amp;\tcup ", "pick " * 9]
    )
    assert ids.tolist() == [[2, 3, 4, 0], [2, 2, 2, 2]]
    assert mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_cleaning_repairs_text():
    assert clean("  the &lt;red&gt;   cup\n") == "the <red> cup"
    assert clean("cafÃ© &amp;lt; bar") == "café < bar"


def test_missing_tokenizer_names_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"download google/umt5-xxl"):
        PromptTokenizer(tmp_path / "nothing")


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 24, 300])
def test_encoder_has_the_bits_of_the_library(dtype, length):
    """``transformers`` is somebody else's implementation of the same encoder."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = TextConfig(vocab=90, dim=16, dim_attn=24, dim_ffn=40, num_heads=4, num_layers=3)
    torch.manual_seed(0)
    own = TextEncoder(config).to(dtype).eval()
    sizes = UMT5Config(
        vocab_size=90, d_model=16, d_kv=6, d_ff=40, num_layers=3, num_heads=4,
        relative_attention_num_buckets=config.num_buckets, relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, is_encoder_decoder=False,
        use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    library = UMT5EncoderModel(sizes).encoder.to(dtype).eval()
    library.load_state_dict(own.stack.state_dict())
    ids = torch.randint(90, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(length) < torch.tensor([[length], [(length + 1) // 2]])
    with torch.no_grad():
        wanted = library(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        assert torch.equal(own.stack(ids, mask), wanted)


@pytest.mark.parametrize("source", ["words", "bundled"])
def test_tokens_are_those_of_the_library(tokenizer_folder, source):
    from transformers import AutoTokenizer

    folder = tokenizer_folder if source == "words" else default_checkpoint() / TOKENIZER_FOLDER
    texts = ["pick up the cup", "", "café </s> pick &amp; <pad> cup", "抓住杯子 🤖", "cup " * 40]
    library = AutoTokenizer.from_pretrained(str(folder))
    wanted = library(
        [clean(text) for text in texts], return_tensors="pt", padding="max_length",
        truncation=True, max_length=24, add_special_tokens=True,
    )  # fmt: skip
    ids, mask = PromptTokenizer(folder, text_len=24)(texts)
    assert torch.equal(ids, wanted["input_ids"])
    assert torch.equal(mask, wanted["attention_mask"])
