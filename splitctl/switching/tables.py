"""What builds are known to do with split modes: data for `rules`.

The tables only say where to look: builds outside `MEASURED` are tried in a child process, and what the child saw wins
over every row here, in both directions (ALiBi excepted, see `rules`).

Source: llm_arch_supports_sm_tensor in llama-arch.cpp of llama-cpp-python 0.3.36; a sweep of 198 dummy models of 146
architectures over xllamacpp 2026.10.11549 on CPU devices, each mode and layout in its own child; what loads in tensor
mode in 2026.8.10566 and 2026.9.11063. (2026.6.9713 refuses nothing at load and dies at the first decode of most.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Builds whose answers below were seen, not inferred.
MEASURED = frozenset({"xllamacpp 2026.10.11549", "llama-cpp-python 0.3.36"})

#: Packages that count in their own way -> a build number that theirs is not older than.  Source: the source that 0.3.36
#: ships has all that 11063 has, and not what 11549 mended.
_PACKAGE_NUMBERS = {"llama-cpp-python 0.3.36": 11063}

_NUMBER = re.compile(r"\.(\d{4,6})$")


@dataclass(frozen=True, slots=True)
class ArchitectureFault:
    """Architectures with one fault in tensor mode.

    Args:
        architectures: GGUF names.
        what: what the build does with them, as a phrase.
        fixed_in: number of the first build known to be free of it; None while none is.
    """

    architectures: frozenset[str]
    what: str
    fixed_in: int | None = None


#: Architectures that cannot run in tensor mode, with what happens.
TENSOR_ARCHITECTURES: tuple[ArchitectureFault, ...] = (
    ArchitectureFault(
        frozenset({
            "grok", "mpt", "plamo2", "minicpm3", "gemma3n", "mamba", "mamba2", "jamba", "falcon-h1", "olmo2",
            "olmoe", "deepseek2", "deepseek32", "hy_v4", "dots3note", "glm-dsa", "bitnet", "t5", "nemotron_h",
            "nemotron_h_moe", "granitehybrid", "minimax-01", "minimax-m2", "minimax-m3", "mistral4", "kimi-linear",
            "bailingmoe3", "kimi-k3", "glm5-next", "qwen3tts",
        }),
        "libllama refuses it when the model loads",
    ),
    ArchitectureFault(frozenset({"qwen4exp"}), "libllama refuses it when the model loads", fixed_in=11549),
    ArchitectureFault(frozenset({"deepseek4"}), "libllama refuses it when the model loads", fixed_in=11063),
    ArchitectureFault(
        frozenset({"rwkv6", "rwkv7", "arwkv7", "rwkv6qwen2", "t5encoder"}),
        "libllama aborts when the context is made (llama-model.cpp, suffix_fallback)",
    ),
    ArchitectureFault(
        frozenset({"chameleon", "jina-bert-v2"}),
        "libllama aborts at the first decode (ggml-backend-meta.cpp, unsupported split of a norm)",
    ),
)  # fmt: skip

#: Cache types that tensor mode takes before `FULL_CACHE_TYPES_SINCE`; the others assert when the context is made.
EARLY_TENSOR_CACHE_TYPES = frozenset({"f32", "f16", "bf16", "q8_0", "q4_0"})
FULL_CACHE_TYPES_SINCE = 11549

#: First build seen to restore every stream of a context that has one for each sequence; 9713 and 10566 keep the last
#: one alone, and say that they read it all.  Source: the state of two sequences on real builds.
ALL_STREAMS_RESTORED_SINCE = 11063

#: A tensor split that comes out closer than this to what was asked is not worth a word.
SPLIT_NOISE = 0.02

#: Cache types that come in blocks of 32 values.
QUANTIZED_CACHE_TYPES = frozenset({"q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"})
CACHE_BLOCK_VALUES = 32

#: Cache types that a carry can be converted from and not to.
SOURCE_ONLY_CACHE_TYPES = frozenset({"iq4_nl"})

#: Architectures whose saved state has a format of its own, which is carried whole.
OPAQUE_STATES = frozenset({"deepseek4"})

#: Architectures whose saved states were seen to hold the layers and the widths of rows that their headers promise.
#: Source: states of every dummy in four layouts, by `NEWEST_SEEN` and the builds of 2026 before it, which differ for
#: glm-dsa and qwen4exp.
SEEN_MEMORIES = frozenset({
    "afmoe", "apertus", "arcee", "arctic", "arwkv7", "baichuan", "bailingmoe", "bailingmoe2", "bailingmoe3",
    "bitnet", "bloom", "chameleon", "chatglm", "codeshell", "cogvlm", "cohere2", "cohere2moe", "command-r", "dbrx",
    "deci", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "dots1", "dots3note", "ernie4_5",
    "ernie4_5-moe", "exaone", "exaone-moe", "exaone4", "falcon", "falcon-h1", "gemma", "gemma2", "gemma3",
    "gemma3n", "gemma4", "glm4", "glm4moe", "glm5-next", "gpt-oss", "gpt2", "gptneox", "granite", "granite_swa",
    "granitehybrid", "granitemoe", "grok", "grovemoe", "hrm_text", "hunyuan-dense", "hunyuan-moe", "hunyuan_vl",
    "hy_v3", "hy_v4", "internlm2", "jais", "jais2", "jamba", "kimi-k3", "kimi-linear", "laguna", "lfm2", "lfm2moe",
    "llama", "llama-embed", "llama4", "maincoder", "mamba", "mamba2", "maple", "mellum", "mimo2", "minicpm",
    "minicpm3", "minimax-01", "minimax-m2", "minimax-m3", "mistral3", "mistral4", "mpt", "muse-glimmer", "nanbeige",
    "nemotron", "nemotron_h", "nemotron_h_moe", "olmo", "olmo2", "olmoe", "openelm", "orion", "paddleocr",
    "pangu-embedded", "phi2", "phi3", "phimoe", "plamo", "plamo2", "plamo3", "pockettts", "qwen", "qwen2",
    "qwen2moe", "qwen2vl", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen3tts", "qwen3vl",
    "qwen3vlmoe", "refact", "rwkv6", "rwkv7", "seed_oss", "smallthinker", "smollm3", "spark2_5", "stablelm",
    "starcoder", "starcoder2", "step35", "t5", "t5encoder", "talkie", "xverse",
})  # fmt: skip
NEWEST_SEEN = 11549


def has_seen_memory(architecture: str, number: int | None, *, is_plain: bool) -> bool:
    """Tell whether a header says for sure what a state of a build (None: of unknown number) holds.

    A later build may change the parts of a memory; one plain cache of every layer is what it was.
    """
    is_seen = number is not None and number <= NEWEST_SEEN
    return architecture in SEEN_MEMORIES and (is_plain or is_seen)


def build_number(version: str) -> int | None:
    """Find llama.cpp's build number in a package's version, such as "xllamacpp 2026.10.11549" or "0.11739".

    Returns:
        The number, or one that it is not older than; None where neither is known.
    """
    found = _NUMBER.search(version.strip())
    return int(found[1]) if found else _PACKAGE_NUMBERS.get(version.strip())


def tensor_fault(architecture: str, number: int | None) -> str | None:
    """Tell what a build (None: of unknown number) does with an architecture in tensor mode.

    None when no row names it.
    """
    for row in TENSOR_ARCHITECTURES:
        fixed = row.fixed_in is not None and number is not None and number >= row.fixed_in
        if architecture in row.architectures and not fixed:
            return row.what
    return None
