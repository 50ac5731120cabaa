"""Checks of settings that have one shape have one function, whose message says what is wrong and what to do."""

import re

import pytest

from perturn.errors import (
    ConfigError,
    check_belongs,
    check_fit,
    check_free,
    check_known,
    check_provided,
    listed,
    required,
)


def refused(message):
    return pytest.raises(ConfigError, match=f"^{re.escape(message)}$")


def test_a_value_that_does_not_fit_is_quoted_after_what_it_must_be():
    check_fit(True, "limit", "be >= 0", 3)

    with refused("limit must be >= 0, got -1."):
        check_fit(False, "limit", "be >= 0", -1)
    with refused("limit must be >= 0, got -1. Leave it out."):
        check_fit(False, "limit", "be >= 0", -1, "Leave it out.")


def test_a_large_value_that_does_not_fit_is_quoted_in_part():
    with pytest.raises(ConfigError) as error:
        check_fit(False, "rows", "be pairs", ["x" * 1000] * 1000)

    assert len(str(error.value)) < 1500


def test_what_is_missing_is_named_with_who_reads_it():
    assert required(0, "n", "nobody reads it", "set it") == 0

    with refused("environment is missing, and this stage plays in it; set it in the recipe."):
        required(None, "environment", "this stage plays in it", "set it in the recipe")


def test_settings_without_their_owner_are_named():
    given = {"--policy": None, "--repo": "me/mine", "--private": True}
    check_belongs(given, True, "--to hub", "add it")
    check_belongs({"--policy": None, "--n": False}, False, "--to hub", "add it")

    with refused("--repo and --private belong to --to hub; add it, or leave them out."):
        check_belongs(given, False, "--to hub", "add it, or leave them out")
    with refused("--n belongs to --model; add it."):
        check_belongs({"--n": 0, "--kinds": [], "--name": ""}, False, "--model", "add it")


def test_what_is_not_provided_is_named_with_its_reader_and_its_owner():
    check_provided("credit x", ["values"], {"values", "answers"}, "training", "take another")

    with refused("credit x needs answers and values, which training does not provide; take another."):
        check_provided(
            "credit x", ["answers", "distance", "values"], {"distance"}, "training", "take another"
        )


def test_a_name_that_is_taken_is_rejected():
    check_free("mine", {"sft"}, "package x adds", "Rename it.")

    with refused("package x adds 'sft', and that name is taken. Rename it."):
        check_free("sft", {"sft"}, "package x adds", "Rename it.")


def test_an_unknown_name_may_have_a_remedy_of_its_own():
    with refused("unknown split 'tset'. Did you mean 'test'? Known: test, train. Correct it."):
        check_known("tset", {"train", "test"}, "unknown split 'tset'", "Correct it.")


def test_names_are_listed_as_in_a_sentence():
    assert [listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
