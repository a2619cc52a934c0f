"""Settings: file < environment < flags; wrong keys and values are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.models.target import ResolvedModel, resolve
from cluster.settings import component_configs
from cluster.settings.components import VerifierSettings
from cluster.settings.config import load
from speculation.errors import ConfigurationError
from tests.running.refusals import refuses


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("verifier: {max_num_seqs: 2, dtype: float32, max_waiting: 3}\nmodel: from-file\n")
    environ = {"OUTRIDER_VERIFIER__DTYPE": "bfloat16", "OUTRIDER_VERIFIER__MAX_WAITING": "4", "PATH": "/bin"}
    settings = load(file, ["verifier.max_waiting=5"], environ)
    assert settings.verifier.max_num_seqs == 2
    assert settings.verifier.dtype == "bfloat16"
    assert settings.verifier.max_waiting == 5
    assert settings.model == "from-file"


@pytest.mark.parametrize(
    ("flags", "environ", "refusal"),
    [
        (["verifier.dtyp=x"], {}, ("verifier.dtyp",)),
        (["nonsense=x"], {}, ("nonsense",)),
        ([], {"OUTRIDER_VERIFIER__DTYP": "x"}, ("verifier.dtyp",)),
        (["verifier.dtype=int3"], {}, ("verifier.dtype", "'int3'")),
        (["server.port=70000"], {}, ("server.port", "'70000'")),
        (["server.page=perhaps"], {}, ("server.page", "'perhaps'")),
        (["metrics.names_of=vllm"], {}, ("metrics.names_of", "'vllm'")),
        (["metrics.names_of=[sglnag]"], {}, ("metrics.names_of.0", "'sglnag'")),
        (["tracing.sample_ratio=all"], {}, ("tracing.sample_ratio", "'all'")),
        (["verifier.max_num_seqs=0"], {}, ("verifier.max_num_seqs", "'0'")),
        (["verifier"], {}, ("--set", "verifier")),
        (["server.api_key_hashes=[a"], {}, ("server.api_key_hashes", "'[a'")),
        (["server.api_key_hashes=[secret]"], {}, ("server.api_key_hashes.0", "'secret'")),
        (["router.replicas=0"], {}, ("router.replicas", "'0'")),
        (["model=2", "model.x=1"], {}, ("model.x",)),
    ],
)
def test_wrong_settings_are_named(flags: list[str], environ: dict[str, str], refusal: tuple[object, ...]) -> None:
    with refuses(ConfigurationError, *refusal):
        load(None, flags, environ)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("verifier.dtpye", "verifier.dtype"),
        ("verifer.dtype", "verifier"),
        ("port", "server.port, verifier.port or drafter.port"),
        ("dtype", "verifier.dtype or drafter.dtype"),
        ("replicas", "router.replicas, verifier.replicas or drafter.replicas"),
        ("server.dtype", "verifier.dtype or drafter.dtype"),
        ("max_num_seq", "verifier.max_num_seqs"),
        ("modle", "model"),
        ("cluster.placement.rooter", "cluster.placement.router"),
        ("router.autoscaling.min_replica", "router.autoscaling.min_replicas"),
        ("verifier.zzz", None),
    ],
)
def test_an_unknown_name_suggests_a_known_one(tmp_path: Path, name: str, meant: str | None) -> None:
    """In a file, in the environment and as a flag alike."""
    file = tmp_path / "c.yaml"
    *sections, last = name.split(".")
    file.write_text(
        "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(sections)) + f"{'  ' * len(sections)}{last}: 1\n"
    )
    shown = "verifer" if name.startswith("verifer.") else name
    said = f"unknown setting {shown}" + (f": did you mean {meant}? Known here: " if meant else "; known here: ")
    environ = {f"OUTRIDER_{'__'.join(name.split('.')).upper()}": "1"}
    for path, flags, given in ((file, [], {}), (None, [], environ), (None, [f"{name}=1"], {})):
        with refuses(ConfigurationError, says=said) as caught:
            load(path, flags, given)
        if name.startswith("verifier."):
            assert str(caught.value).endswith(f"nown here: {', '.join(sorted(VerifierSettings.model_fields))}")


def test_the_clients_api_key_is_no_setting() -> None:
    assert load(None, (), {"OUTRIDER_API_KEY": "x"}) == load(None, (), {})


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="missing.yaml"):
        load(tmp_path / "missing.yaml", (), {})
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with refuses(ConfigurationError, field="broken.yaml", says="cannot read"):
        load(broken, (), {})
    broken.write_text("- 1")
    with refuses(ConfigurationError, field="broken.yaml", says="must be a mapping"):
        load(broken, (), {})


def test_settings_that_contradict_each_other() -> None:
    with refuses(ConfigurationError, field="drafter.prompt_lookup_min", value=9):
        component_configs.drafter_config(
            load(None, ["drafter.prompt_lookup_min=9"], {}), ResolvedModel(name="m", path=Path("m"))
        )
    with refuses(ConfigurationError, field="server.tls_certificate and server.tls_key"):
        component_configs.server_config(load(None, ["server.tls_key=/tmp/x"], {}))
    flags = ["router.acceptance=rejection", "drafter.trusted=false"]
    with refuses(ConfigurationError, field="router.acceptance", value="rejection"):
        component_configs.router_config(load(None, flags, {}), ResolvedModel(name="m", path=Path("m")))
    with refuses(ConfigurationError, field="router.strategy", value="magic", allowed="one of"):
        component_configs.router_config(load(None, ["router.strategy=magic"], {}), ResolvedModel(name="m", path=Path("m")))


def test_lists_may_be_given_as_flags() -> None:
    hashes = ("a" * 64, "b" * 64)
    assert load(None, [f"server.api_key_hashes=[{', '.join(hashes)}]"], {}).server.api_key_hashes == hashes


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with refuses(ConfigurationError, field="model", value="x.gguf"):
        resolve(str(tmp_path / "x.gguf"), tmp_path)
    with refuses(ConfigurationError, field="model", says="no config.json"):
        resolve(str(tmp_path), tmp_path)


def test_a_folder_is_taken_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny_model), tmp_path).path == tiny_model.resolve()


SECRETS = ("internal_token", "retrieval.redis_password", "router.learning_redis_password")


@pytest.mark.parametrize("key", SECRETS)
@pytest.mark.parametrize(
    "secret", ["[S3cret-of-somebody", "{S3cret-of-somebody", "[S3cret-of-somebody]", "null-S3cret-of-somebody"]
)
def test_secrets_are_texts_whatever_they_begin_with(key: str, secret: str) -> None:
    name = f"OUTRIDER_{key.upper().replace('.', '__')}"
    given = {name: secret, "OUTRIDER_RETRIEVAL__REDIS_URL": "redis://a", "OUTRIDER_ROUTER__LEARNING_REDIS_URL": "redis://a"}
    found: object = load(None, [], given)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == secret


@pytest.mark.parametrize(
    "environ",
    [
        {"OUTRIDER_RETRIEVAL": "{redis_password: [S3cret"},
        {"OUTRIDER_RETRIEVAL": "redis_password: S3cret"},
        {"OUTRIDER_RETRIEVAL": "{redis_password: [S3cret]}"},
        {"OUTRIDER_INTERNAL_TOKEN": "S3cret"},
    ],
)
def test_no_refusal_shows_a_secret(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="is hidden") as caught:
        load(None, [], environ)
    assert "S3cret" not in str(caught.value)


@pytest.mark.parametrize("flag", ["retrieval.redis_password=S3cret", "retrieval={redis_password: S3cret}"])
def test_no_flag_holds_a_secret(flag: str) -> None:
    with refuses(ConfigurationError, "--set", "retrieval.redis_password"):
        load(None, [flag], {})
