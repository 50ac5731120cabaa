"""The self-test of a service: by what it divides the gradient that it is sent."""

import pytest

from perturn.errors import RunError

CONVENTIONS = [
    {},
    {"of_sequence": "tokens"},
    {"of_batch": "sequences"},
    {"of_batch": "tokens"},
    {"of_sequence": "tokens", "of_batch": "sequences", "clips": False},
    {"of_batch": "sequences", "batch": "request"},
    {"of_batch": "tokens", "batch": "request"},
]


@pytest.fixture
def find(settings):
    """The convention that a service is found to have."""

    def find(service):
        from perturn.backends.tinker.gradient_convention import find_convention
        from perturn.engines.tinker.service import Service

        session = Service(settings(service))
        try:
            return find_convention(session, "tiny", 4)
        finally:
            session.close()

    return find


@pytest.mark.parametrize("how", CONVENTIONS, ids=str)
def test_the_convention_of_a_service_is_found(serving, find, how):
    """Whatever it divides by, and whether it clips; its adapters of the self-test are gone afterwards."""
    service = serving(**how)

    found = find(service)

    expected = {"of_sequence": "nothing", "of_batch": "nothing", "batch": "step", "clips": True} | how
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.loss == "importance_sampling"
    assert not service.adapters


def test_a_service_without_importance_sampling_is_sent_signed_weights(serving, find):
    """As `forward_backward_custom` of the client would send them."""
    from support.tinker_service import Faults

    assert find(serving(faults=Faults(rejects=("importance_sampling",)))).loss == "cross_entropy"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"sign": -1.0}, "moves against the gradient"),
        ({"sign": 0.0}, "found no learning rate at which a step changes"),
        ({"replaces": True}, r"not apply the gradient .* in two requests (0|1)\.\d+"),
        ({"nan": True}, "log-probabilities that are not one finite number per token"),
        ({"rejects": ("importance_sampling", "cross_entropy")}, "unknown loss cross_entropy"),
    ],
)
def test_a_service_that_does_something_else_is_rejected(serving, find, fault, says):
    """The error shows what was seen."""
    from support.tinker_service import Faults

    with pytest.raises(RunError, match=says):
        find(serving(faults=Faults(**fault)))
