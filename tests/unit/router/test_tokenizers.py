"""The router's tokenizer from tokenizer.json alone gives what transformers gives, or is not used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

from services.router import tokenizer_file
from services.router.tokenizer_file import FileTokenizer, open_file
from services.router.tokens import load
from services.router.transformers_tokenizer import TransformersTokenizer
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses

TEXTS = (
    "hello", " hello", "hello ", "  two  spaces  ", "\n\n\tindent\r\n", "Größe, naïve, 東京", "🙂🙃 👩‍👩‍👧 e\u0301",
    "<|end|>", "text<|end|>more <|user|> <|assistant|>", "\x00\x01", "▁under ▁", "a" * 500, "def f(x):\n    return x\n",
    "don't can't I'm we'll", "12345 3.14 1,000", "\ufffd", "'", ".", " .", "Hello , world !", "<s>x</s>", "<unk>",
)  # fmt: skip
TEMPLATES = (
    "{% for m in messages %}{{ bos_token }}[{{ m.role }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
    # Blocks on lines of their own: trimmed, and stripped before.
    "{% for m in messages %}\n    {% if m.role == 'system' %}\n    {% continue %}\n    {% endif %}\n"
    "{{ loop.index0 }}:{{ m.content | trim }}\n{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
    "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ '<b>&' | tojson }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}{{ ns.n }}",
    "{{ strftime_now('%Y') }}{{ tools is none }}{{ documents is none }}{{ dict(a=1) }}{{ unk_token is defined }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}{{ messages[-1].content }}",
    "{{ namespace(_x=1) }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ nothing.at.all }}",
)  # fmt: skip
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": " be brief "}, {"role": "user", "content": "<|end|> Größe\n"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "  b\n"}, {"role": "user", "content": "c & <d>"}],
    [{"role": "tool", "content": ""}],
)


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    train(made, pre_tokenizers.ByteLevel.alphabet())
    return made


def with_bos() -> Tokenizer:
    """As Llama 3 has it: the file's post-processor writes the token that begins a text."""
    made = byte_level()
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return made


def word_pieces() -> Tokenizer:
    """With a prefix, lower case, and lengths that are for training alone."""
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([*TEXTS], trainer)
    made.enable_truncation(4)
    return made


def sentence_pieces() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    train(made, [f"<0x{byte:02X}>" for byte in range(256)][:1])
    return made


SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>", "<|user|>", "<|assistant|>"]
MAKERS = {"byte_level": byte_level, "with_bos": with_bos, "word_pieces": word_pieces, "sentence_pieces": sentence_pieces}


def train(made: Tokenizer, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([*TEXTS, "the quick brown fox " * 3], trainer)


def save(folder: Path, made: Tokenizer, template: Any = TEMPLATES[0], **more: Any) -> Path:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<|end|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **tokens)
    fast.save_pretrained(folder)
    change(folder, chat_template=template, **more)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def change(folder: Path, **settings: Any) -> None:
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


class Reference:
    """transformers itself."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self.has_chat_template = bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, conversation: list[dict[str, str]]) -> list[int]:
        made = self._tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
        return list(made["input_ids"])

    def decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def both(folder: Path) -> tuple[FileTokenizer, Reference]:
    ours = open_file(folder)
    assert ours is not None
    return ours, Reference(folder)


def compare(folder: Path, texts: tuple[str, ...] = TEXTS) -> None:
    ours, theirs = both(folder)
    for text in texts:
        ids = list(theirs.encode(text))
        assert list(ours.encode(text)) == ids, text
        for cut in {0, 1, len(ids) // 2, len(ids)}:
            assert ours.decode(ids[:cut]) == theirs.decode(ids[:cut]), text
    assert bool(ours.templates) == theirs.has_chat_template
    if ours.templates:
        through = TransformersTokenizer(str(folder))
        for conversation in CONVERSATIONS:
            assert outcome(ours, conversation) == outcome(theirs, conversation) == outcome(through, conversation)


def chat_ids(tokenizer: FileTokenizer | TransformersTokenizer | Reference, conversation: list[dict[str, str]]) -> list[int]:
    if isinstance(tokenizer, Reference):
        return tokenizer.encode_chat(conversation)
    assert tokenizer.templates.default is not None
    return list(tokenizer.encode(tokenizer.templates.default.render(conversation), special=False))


def outcome(tokenizer: FileTokenizer | TransformersTokenizer | Reference, conversation: list[dict[str, str]]) -> object:
    """The ids, or that the template refuses."""
    try:
        return chat_ids(tokenizer, conversation)
    except TemplateError:
        # Ours comes out of another process, in words.
        return "refused"


@pytest.mark.parametrize("kind", MAKERS)
def test_the_same_ids_and_texts(kind: str, tmp_path: Path) -> None:
    compare(save(tmp_path, MAKERS[kind]()))


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_alike(template: str, tmp_path: Path) -> None:
    compare(save(tmp_path, byte_level(), template), ())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[FileTokenizer, Reference]:
    return both(save(tmp_path_factory.mktemp("pair"), with_bos()))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1), role=st.sampled_from(["user", "system", "x"]))
def test_any_text_and_any_message(pair: tuple[FileTokenizer, Reference], text: str, role: str) -> None:
    ours, theirs = pair
    ids = list(theirs.encode(text))
    assert list(ours.encode(text)) == ids
    assert ours.decode(ids) == theirs.decode(ids)
    conversation = [{"role": role, "content": text}]
    assert chat_ids(ours, conversation) == chat_ids(theirs, conversation)


def test_where_templates_may_lie(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": TEMPLATES[2]}]
    compare(save(tmp_path, byte_level(), named), ())
    # A file of its own goes before the settings.
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[6])
    compare(tmp_path, ())
    (tmp_path / "chat_template.jinja").unlink()
    change(tmp_path, chat_template=None)
    compare(tmp_path, ())
    ours = open_file(tmp_path)
    assert ours is not None
    assert not ours.templates


@pytest.mark.parametrize(
    "settings_of_it",
    [
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": True},
        {"clean_up_tokenization_spaces": True, "model_max_length": 3},
        {"bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": True}},
        {"additional_special_tokens": ["<|user|>"], "image_token": "<|user|>"},
        {"added_tokens_decoder": {
            "3": {"content": "<|end|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        }},
    ],
)  # fmt: skip
def test_settings_that_change_nothing(settings_of_it: dict[str, Any], tmp_path: Path) -> None:
    compare(save(tmp_path, with_bos(), **settings_of_it))


@pytest.mark.parametrize(
    "settings_of_it",
    [
        {"tokenizer_class": "GPT2Tokenizer"},
        {"tokenizer_class": "Qwen2TokenizerFast"},
        {"tokenizer_class": None},
        {"split_special_tokens": True},
        {"auto_map": {"AutoTokenizer": ["x.Y", None]}},
        {"eos_token": "<|not there|>"},
        {"extra_special_tokens": ["<|not there|>"]},
        {"added_tokens_decoder": {"3": {"content": "<|end|>", "special": False}}},
    ],
)
def test_what_only_transformers_knows_is_left_to_it(settings_of_it: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    assert open_file(tmp_path) is not None
    change(tmp_path, **settings_of_it)
    if settings_of_it.get("tokenizer_class", "") is None:
        file = tmp_path / "tokenizer_config.json"
        file.write_text(
            json.dumps({key: value for key, value in json.loads(file.read_text()).items() if key != "tokenizer_class"})
        )
    assert open_file(tmp_path) is None


def test_words_with_spaces_cleaned_are_left_to_transformers(tmp_path: Path) -> None:
    save(tmp_path, word_pieces(), clean_up_tokenization_spaces=True)
    assert open_file(tmp_path) is None
    assert isinstance(load(str(tmp_path)), TransformersTokenizer)


def test_older_files_and_models_that_transformers_repairs(tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert open_file(tmp_path) is None
    (tmp_path / "config.json").unlink()
    assert open_file(tmp_path) is not None
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<other>"}))
    assert open_file(tmp_path) is None


def test_the_types_of_model_that_transformers_overrules_are_known() -> None:
    plain = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast", None)
    registered = tokenization_auto.TOKENIZER_MAPPING_NAMES
    overruled = {
        name for name in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS if registered.get(name) not in plain
    }
    of_mistral = {name for name, tokenizer in registered.items() if "Mistral" in (tokenizer or "")}
    assert overruled | of_mistral <= set(tokenizer_file._SPECIAL_TYPES)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    save(tmp_path, byte_level())
    (tmp_path / name).write_text("{")
    with refuses(ConfigurationError, tmp_path / name):
        open_file(tmp_path)


def test_a_damaged_template_is_told(tmp_path: Path) -> None:
    save(tmp_path, byte_level(), "{% for %}")
    with refuses(ConfigurationError, says="chat template"):
        open_file(tmp_path)


def test_a_router_needs_neither_torch_nor_transformers(tiny_model: Path) -> None:
    script = (
        "import sys; from services.router.service import RouterService; from services.router.config import RouterConfig; "
        f"from services.router.tokens import Tokens; RouterService(RouterConfig(model_path={str(tiny_model)!r}), None); "
        "print([name for name in ('torch', 'transformers', 'ray', 'grpc') if name in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.strip() == "[]"


def test_special_tokens_of_other_kinds(tmp_path: Path) -> None:
    made = byte_level()
    made.add_tokens([AddedToken("<tool>", special=False, lstrip=True), AddedToken("word", single_word=True)])
    save(tmp_path, made)
    compare(tmp_path, (*TEXTS, "a <tool> b", "word words word", " word"))
