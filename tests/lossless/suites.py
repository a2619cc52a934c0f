"""Which suites of tests/lossless run over ranks and stages (``tests.layouts``), and why the others do not.

Every test of a suite in ``LAID_OUT`` runs in one process, and exhaustively over 2 and 4 ranks and over 2 stages of 2 ranks each;
where it has three cases and more, each of them over one of these, in turns. Plain answers are those of one process;
``test_ranks_in_services`` compares what is said in a form, of chosen words and with log-probabilities.
"""

from __future__ import annotations

# What each test runs over, by the names of ``tests.layouts``; the first in `make test`.
ONE_PROCESS = "one process"
OTHERS = ("2 ranks", "4 ranks", "2 stages of 2 ranks")
# Where models of some types or sizes cannot be laid out so, which their refusals say.
SOME_REFUSED = "some refused"
LAID_OUT: dict[str, str] = {
    "test_attention": SOME_REFUSED,
    "test_draft_model_is_lossless": "",
    "test_generation_files": "",
    "test_heads_are_lossless": "",
    "test_hidden_states": SOME_REFUSED,
    "test_lora_is_exact": "",
    "test_lora_of_all_kinds": SOME_REFUSED,
    "test_model_source": "",
    "test_mtp_of_the_target": SOME_REFUSED,
    "test_prediction": "",
    "test_quantised": SOME_REFUSED,
    "test_quantised_answers": SOME_REFUSED,
    "test_rounded_inputs": SOME_REFUSED,
    "test_shared_draft_model": "",
    "test_strategies": "",
    "test_structured": "",
    "test_target_is_exact": SOME_REFUSED,
    "test_trained_recipes": SOME_REFUSED,
    "test_uno": "",
    "test_uno_is_lossless": "",
    "test_where_models_draft": "",
    "test_words": "",
}
_NO_TARGET = "makes no whole target, or one that is refused or planted: rules, kernels or files alone"
_THEMSELVES = "lays its targets out itself, in processes or threads, with faults planted between them"
_STATES = "layers with a state are not shared by ranks, which is refused; over stages it has tests of its own"
_STREAMS = "streams in a pass are refused over ranks"
_GPUS = "computes as GPUs do, in Triton's interpreter; ranks there: test_triton_ranks"
LEFT_OUT: dict[str, str] = {
    "test_act_order": _THEMSELVES,
    "test_architectures": "starts every type that transformers knows; those that ranks share: test_ranks_of_other_types",
    "test_assistant_drafts": "Gemma 4 is of no type that ranks share, which is refused",
    "test_bench_catches": "is about the benchmark",
    "test_captured_states": _GPUS,
    "test_choice_by_shard": _THEMSELVES,
    "test_choice_by_shard_on_gpus": _GPUS,
    "test_draws_by_shard": _THEMSELVES,
    "test_early_exit": _STREAMS,
    "test_enumeration": _NO_TARGET,
    "test_experts_are_exact": "is about sizes that fill no vectors, which ranks refuse; mixtures over ranks: test_tensor_parallel",
    "test_experts_together": "compares two ways of one process to call its kernels",
    "test_fused_experts": _THEMSELVES,
    "test_gated_norms": _NO_TARGET,
    "test_generation_config": _NO_TARGET,
    "test_gguf_by_rules": "is about files, and types whose layers have a state, which ranks do not share",
    "test_hybrids_are_lossless": _STATES,
    "test_kept_states": _STATES,
    "test_logprobs_of_hybrids": _STATES,
    "test_lora_in_processes": _THEMSELVES,
    "test_lora_in_stages": _THEMSELVES,
    "test_lora_is_lossless": _THEMSELVES,
    "test_lora_over_ranks": _THEMSELVES,
    "test_new_weights_over_ranks": _THEMSELVES,
    "test_quantised_mixtures": _THEMSELVES,
    "test_quantised_refusals": _NO_TARGET,
    "test_ranks_in_services": _THEMSELVES,
    "test_ranks_of_other_types": _THEMSELVES,
    "test_rounded_cache_by_triton": _GPUS,
    "test_rounded_cache_moves": _THEMSELVES,
    "test_rounded_cache_target": _THEMSELVES,
    "test_rounded_experts": _THEMSELVES,
    "test_rounded_on_gpus": _GPUS,
    "test_split_hybrids": _STATES,
    "test_stages": _THEMSELVES,
    "test_stages_over_nccl": _THEMSELVES,
    "test_states_are_exact": _STATES,
    "test_stream_rows": _STREAMS,
    "test_stream_rows_by_triton": _STREAMS,
    "test_structured_enumeration": _NO_TARGET,
    "test_tensor_parallel": _THEMSELVES,
    "test_tied_layers": "is about weights that several layers of a hybrid share, and ranks do not take those",
    "test_triton_ranks": _THEMSELVES,
    "test_triton_states": _GPUS,
    "test_triton_steps": _GPUS,
    "test_triton_target": _GPUS,
    "test_uno_in_stages": _THEMSELVES,
    "test_weights_as_stored": "is about files and memory; over ranks, weights as stored: test_tensor_parallel",
}
# Of suites that are laid out, tests of one process, by reason.
OF_ONE_PROCESS: dict[str, tuple[str, ...]] = {
    _NO_TARGET: (
        "test_draft_model_is_lossless::test_its_sampled_chains_are_lossless_under_rejection",
        "test_draft_model_is_lossless::test_stopping_by_what_was_drawn_would_not_be",
        "test_heads_are_lossless::test_sampled_chains_are_lossless_under_rejection",
        "test_hidden_states::test_a_model_whose_layers_cannot_be_told_apart",
        "test_hidden_states::test_layers_in_one_call_each_are_observed",
        "test_lora_is_exact::test_a_product_is_its_formula_and_no_row_changes_another",
        "test_prediction::test_a_prediction_that_nothing_would_be_drafted_from_is_refused",
        "test_prediction::test_long_predictions_are_read_a_piece_at_a_time",
        "test_prediction::test_the_answer_is_followed_and_found_again",
        "test_prediction::test_where_a_text_repeats_itself_the_nearest_place_is_taken",
        "test_prediction::test_who_uses_a_prediction",
        "test_quantised::test_codes_and_scales_may_lie_in_different_files",
        "test_quantised::test_it_drafts",
        "test_quantised::test_rows_in_several_places_are_read_of_blocks",
        "test_quantised::test_the_memory_of_blocks_is_known_before_they_are_read",
        "test_quantised::test_the_plan_says_what_it_becomes",
        "test_quantised::test_weights_are_the_numbers_of_the_format",
        "test_rounded_inputs::test_blocks_whose_scales_are_rounded_themselves",
        "test_rounded_inputs::test_blocks_whose_scales_are_powers_of_two",
        "test_rounded_inputs::test_fields_are_checked",
        "test_rounded_inputs::test_fields_of_four_bits_are_checked",
        "test_rounded_inputs::test_fields_of_powers_of_two_are_checked",
        "test_rounded_inputs::test_files_from_before_scales_had_a_type",
        "test_rounded_inputs::test_it_drafts",
        "test_rounded_inputs::test_logits_are_those_of_the_package",
        "test_rounded_inputs::test_only_layers_that_are_meant",
        "test_rounded_inputs::test_rows_of_zeros_and_of_small_numbers",
        "test_rounded_inputs::test_static_scales_of_rows_are_refused",
        "test_rounded_inputs::test_stored_scales_are_checked",
        "test_rounded_inputs::test_the_plan_says_so",
        "test_rounded_inputs::test_weights_are_not_replaced_by_those_that_round_otherwise",
        "test_rounded_inputs::test_whole_layers_round_in_our_kernels",
        "test_target_is_exact::test_a_tree_that_is_too_large_is_refused",
        "test_target_is_exact::test_models_that_cannot_be_served_are_refused_at_start",
        "test_uno::test_an_adapter_for_another_model_is_refused",
        "test_uno::test_layers_with_a_state_have_no_noise",
        "test_where_models_draft::test_a_form_without_streams_is_refused",
        "test_where_models_draft::test_pruning_without_a_pass_to_prune_is_refused",
    ),
    _THEMSELVES: (
        "test_hidden_states::test_layers_of_every_stage",
        "test_quantised::test_two_stages_say_what_the_float_model_says",
        "test_rounded_inputs::test_adapters_over_ranks_read_what_is_not_rounded",
        "test_rounded_inputs::test_two_ranks_say_the_same",
        "test_rounded_inputs::test_two_stages_say_the_same",
        "test_uno_is_lossless::test_no_token_changes_over_stages_and_ranks",
    ),
    _STREAMS: (
        "test_heads_are_lossless::test_streams_in_the_targets_own_pass",
        "test_strategies::test_streams_in_the_pass_beside_other_models",
        "test_where_models_draft::test_streams_in_the_targets_pass",
    ),
}
