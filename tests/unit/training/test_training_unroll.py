"""The unrolled head computes what drafting token by token computes, and replay counts what a verifier would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from services.drafter.heads.eagle.head import FeatureHead, causal
from services.drafter.heads.files.head_config import head_for
from services.drafter.heads.files.target_rows import read_target_rows, read_target_shape
from tests.drafters.model_source import ModelDouble
from tests.tiny_models.tiny import make_tiny_model
from training.batches import head_rows
from training.curves import loss_curves
from training.head_learner import HeadLearner
from training.learner import Tally
from training.recipe import HeadRecipe, load_recipe
from training.shards import TrainingSequence
from training.state_columns import StateColumns
from training.tree_replay import passes_of, tokens_per_pass
from training.unroll import unroll

_STEPS = 3


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> FeatureHead:
    target = make_tiny_model(tmp_path_factory.mktemp("target"))
    torch.manual_seed(1)
    head = FeatureHead(head_for(read_target_shape(target), "fspad"), read_target_rows(target, whole=True))
    torch.nn.init.normal_(head.missing_state)
    return head


def _sequence(length: int, prompt: int, seed: int, unknown: tuple[int, ...] = ()) -> TrainingSequence:
    random = np.random.default_rng(seed)
    known = np.ones(length, dtype=np.bool_)
    known[[*unknown, length - 1]] = False
    return TrainingSequence(
        tokens=random.integers(0, 300, length).astype(np.int32),
        prompt_length=prompt,
        states=random.standard_normal((length, 64)).astype(np.float16),
        known=known,
        domain="a",
        temperature=0.0,
    )


def _drafted(head: FeatureHead, sequence: TrainingSequence, row: int, steps: int) -> torch.Tensor:
    """What the output layer reads ``steps`` drafted tokens behind row ``row``, computed one token at a time."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    states = torch.from_numpy(sequence.states.astype(np.float32))
    read = torch.where(torch.from_numpy(sequence.known)[:, None], states, head.missing_state)[: row + 1]
    hidden = torch.empty(0)
    for step in range(steps + 1):
        rows = row + 1 + step
        output = head(head.embed(tokens[1 : rows + 1])[None], read[None], torch.arange(rows)[None], causal)
        hidden = output.hidden[0, -1]
        read = torch.cat((read, output.state[0, -1:]))
    return hidden


def test_unrolled_steps_equal_drafting_token_by_token(head: FeatureHead) -> None:
    sequences = [_sequence(14, 5, 1), _sequence(3, 1, 2), _sequence(9, 4, 3, unknown=(2, 5)), _sequence(11, 1, 4)]
    rows = head_rows(sequences, 2048, torch.device("cpu"))
    assert rows is not None
    assert [span.stop - span.start for span in rows.spans] == [12, 1, 7, 9]
    compared = 0
    with torch.no_grad():
        for number, step in enumerate(unroll(head, rows, _STEPS)):
            _, at, exists = rows.ahead(number)
            for place, row in enumerate(step.rows.tolist()):
                which = next(index for index, span in enumerate(rows.spans) if span.start <= row < span.stop)
                span, sequence = rows.spans[which], sequences[which]
                own = row - span.start
                assert own >= sequence.prompt_length - 1
                # The state that it predicts, and the token chosen from it.
                ahead = own + 1 + number
                has_label = ahead + 1 < len(sequence.tokens)
                assert bool(exists[row]) == (has_label and bool(sequence.known[ahead]))
                if not has_label:
                    continue
                assert int(rows.label(number)[row]) == sequence.tokens[ahead + 1]
                if sequence.known[ahead]:
                    np.testing.assert_array_equal(rows.states[at[row]].numpy(), sequence.states[ahead].astype(np.float32))
                torch.testing.assert_close(step.hidden[place], _drafted(head, sequence, own, number), rtol=1e-4, atol=1e-4)
                compared += 1
    assert compared > 50


def test_noise_and_missing_states_touch_inputs_alone() -> None:
    recipe = load_recipe("fspad", missing_rows=0.5, answer_only=0.5, noise=1.0)
    assert isinstance(recipe, HeadRecipe)
    sequences = [_sequence(40, 10, seed) for seed in range(40)]
    device = torch.device("cpu")
    plain = head_rows(sequences, 2048, device)
    changed = head_rows(sequences, 2048, device, recipe, np.random.default_rng(1))
    assert plain is not None and changed is not None
    short = [span.stop - span.start for span in changed.spans]
    assert 5 < short.count(29) < 35 and short.count(29) + short.count(38) == 40
    assert 0.4 < float(changed.missing.float().mean()) < 0.6
    # Positions are those of the text, whether its beginning is read or not.
    answers = torch.cat([changed.positions[span.answer : span.stop] for span in changed.spans])
    torch.testing.assert_close(answers, torch.cat([plain.positions[span.answer : span.stop] for span in plain.spans]))
    clean = changed.states[changed.token]
    assert 0 < float((changed.inputs - clean).abs().max()) <= 0.5 * 512 / 31 + 1e-3
    again = head_rows(sequences, 2048, device, recipe, np.random.default_rng(1))
    assert again is not None
    torch.testing.assert_close(changed.inputs, again.inputs, rtol=0, atol=0)


def test_long_sequences_lose_their_beginning() -> None:
    rows = head_rows([_sequence(40, 10, 1)], 16, torch.device("cpu"))
    assert rows is not None
    assert rows.positions.tolist() == list(range(24, 38))
    assert rows.spans[0].answer == 0


def test_answers_of_one_token_teach_nothing(head: FeatureHead) -> None:
    recipe = load_recipe("fspad")
    assert isinstance(recipe, HeadRecipe)
    one = [_sequence(11, 10, 1), _sequence(10, 10, 2)]
    output = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    learner = HeadLearner(head, output, torch.arange(300), recipe, StateColumns(inputs=(-1,), hidden_size=64))
    tally = learner.lose(one, np.random.default_rng(1), 0.0)
    tally.loss.backward()
    assert (tally.rows, tally.overlap, float(tally.loss.detach())) == (0, 0.0, 0.0)
    assert list(learner.predict(one, 2)) == []
    # Beside a longer one they are left out.
    both = head_rows([*one, _sequence(40, 10, 3)], 2048, torch.device("cpu"))
    assert both is not None and len(both.spans) == 1


def test_what_a_loss_is_made_of_is_told_apart(head: FeatureHead) -> None:
    output = torch.randn(300, 64, generator=torch.Generator().manual_seed(1))
    losses = {"precision": "float32", "divergence_weight": 0.1, "regression_weight": 2.0}

    def lose(progress: float, **changed: object) -> Tally:
        recipe = load_recipe("fspad", **losses | changed)
        assert isinstance(recipe, HeadRecipe)
        learner = HeadLearner(head, output, torch.arange(300), recipe, StateColumns(inputs=(-1,), hidden_size=64))
        return learner.lose([_sequence(40, 10, 3)], np.random.default_rng(1), progress)

    begun = lose(0.0)
    assert begun.parts.keys() == {"divergence", "states"}
    assert float(begun.loss.detach()) == pytest.approx(0.1 * begun.parts["divergence"] + 2 * begun.parts["states"])
    # Unrolled, the states are no longer learnt, and told all the same.
    assert lose(0.9).parts == pytest.approx(begun.parts)
    assert lose(0.0, regression_weight=0.0).parts == {}


def test_curves_of_a_run_are_short_and_of_its_last_lines(tmp_path: Path) -> None:
    assert loss_curves(tmp_path, 9) is None
    lines = [{"step": step, "losses": {"divergence": step, "states": 1 / step}} for step in range(1, 1001)]
    # It went on from step 2: what was logged before is not what was learnt.
    before = [{"step": step, "losses": {"divergence": 9e9, "states": 9e9}} for step in range(3, 9)]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines[:2], *before, *lines[2:]]) + '{"step": 10')
    curves = loss_curves(tmp_path, 400)
    assert curves is not None
    assert curves["step"] == list(range(4, 401, 4))
    assert curves["divergence"][:2] == [2.5, 6.5] and len(curves["states"]) == 100
    assert loss_curves(tmp_path, 1) == {"step": [1], "divergence": [1.0], "states": [1.0]}
    # A loss of one thing has no curves, nor has a log of an older version.
    log.write_text('{"step": 1, "losses": {}}\n{"step": 2}\n[]\n')
    assert loss_curves(tmp_path, 9) is None


def test_replay_counts_what_a_verifier_would_accept() -> None:
    # A period of four: the double repeats what followed the last token before, at most three nodes of it.
    tokens = np.array([5, 6, 7, 8] * 6, dtype=np.int32)
    known = np.ones(24, dtype=np.bool_)
    sequence = TrainingSequence(
        tokens=tokens,
        prompt_length=7,
        states=np.zeros((24, 6), dtype=np.float16),
        known=known,
        domain="a",
        temperature=0.0,
    )
    # 16 tokens behind the answer's first one, four in each pass.
    double = ModelDouble(layers=(-1,))
    assert passes_of(ModelDouble(layers=(-1,)), [sequence, sequence], 3) == [4, 4]
    assert tokens_per_pass([sequence, sequence], [4, 4]) == 4.0
    assert passes_of(ModelDouble(answer=[1], layers=(-1,)), [sequence], 3) == [16]
    passes_of(double, [sequence], 3)
    # All states but the last token's are there, and nothing stays open.
    assert double.masked["replay-0"] == []
    assert double.closed == ["replay-0"]
