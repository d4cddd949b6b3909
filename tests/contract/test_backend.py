"""One suite over every backend: reference, exact and the peers always, real engines with `make test-engines`.

The promises are functions in promises.py; test_promises.py shows each of them failing on an engine that breaks it.
What is particular to one engine, or to one release of it, is in that engine's own file.
"""

from collections.abc import Callable, Iterator

import opened
import promises
import pytest
from opened import Checkpoints, Subject


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=opened.REAL.get(name, ())) for name in opened.OPENERS],
)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    """One engine at a time, for all of its tests."""
    with opened.OPENERS[request.param](tmp_path_factory.mktemp("engine")) as subject:
        yield subject


@pytest.mark.parametrize(
    "promise",
    [
        promises.answers_come_in_the_order_of_requests,
        promises.tokens_carry_what_a_trainer_needs,
        promises.seeds_repeat,
        promises.what_is_streamed_is_what_comes_whole,
        promises.scores_are_the_logprobs_that_were_reported,
        promises.alternatives_are_the_likeliest_in_order,
        promises.strange_prompts_are_refused,
        promises.a_longest_prompt_is_not_cut,
        promises.the_fingerprint_names_the_engine_and_no_secret,
        promises.closing_twice_is_fine,
    ],
    ids=lambda promise: promise.__name__,
)
def test_a_backend_keeps(backend: Subject, promise: Callable[[Subject], None]) -> None:
    promise(backend)


def test_what_a_backend_does_not_claim_it_refuses(backend: Subject, checkpoints: Checkpoints) -> None:
    promises.what_is_not_claimed_is_refused(backend, checkpoints)


def test_new_weights_change_the_numbers(backend: Subject, checkpoints: Checkpoints) -> None:
    promises.new_weights_change_the_numbers(backend, checkpoints)


def test_weights_of_another_shape_are_refused(backend: Subject, checkpoints: Checkpoints) -> None:
    """Last in the file: an engine that took them would answer no more."""
    promises.weights_of_another_shape_are_refused(backend, checkpoints)
