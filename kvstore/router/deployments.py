"""All deployments behind one front: each request goes to the core of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import NotFound
from kvstore.router.core import Router
from kvstore.router.placing import Placement, Replica, RouteRequest

__all__ = ["Deployment", "Deployments"]


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model's replicas.

    Attributes:
        model: as callers name it, "" = any.
        names: all names that lead here.
        router: its core.
    """

    model: str
    names: frozenset[str]
    router: Router


class Deployments:
    """A `Picker`.

    A ticket is `number of the core's ticket · deployments + place of the deployment`.

    Args:
        deployments: with distinct names; a single one with the name "" takes every model.
    """

    def __init__(self, deployments: Sequence[Deployment]) -> None:
        self.all = tuple(deployments)
        self._by_name: Mapping[str, int] = {
            name: place for place, each in enumerate(deployments) for name in each.names
        }

    def find(self, model: str) -> int:
        """Place of the deployment of a model.

        Raises:
            NotFound: nobody serves it.
        """
        place = self._by_name.get(model, self._by_name.get(""))
        if place is None and len(self.all) == 1 and not model:
            return 0
        if place is None:
            raise NotFound(
                f"model: {model!r:.120} is not served here; there are {', '.join(sorted(self._by_name))}"
            )
        return place

    def pick(self, request: RouteRequest, avoid: frozenset[str]) -> Placement:
        """See `Picker`.

        Raises:
            NotFound, Unavailable: as `find`, and `Router.pick`.
        """
        place = self.find(request.model)
        found = self.all[place].router.pick(request, avoid)
        ticket = found.ticket * len(self.all) + place
        return Placement(found.replica, found.url, found.expected_tokens, found.reason, ticket)

    def sent(self, ticket: int) -> None:
        """See `Picker`."""
        self._router(ticket).sent(ticket // len(self.all))

    def first_byte(self, ticket: int, seconds: float) -> None:
        """See `Picker`."""
        self._router(ticket).first_byte(ticket // len(self.all), seconds)

    def finished(
        self,
        ticket: int,
        cached_tokens: int | None,
        prompt_tokens: int | None,
        output_tokens: int | None,
        ok: bool,
    ) -> None:
        """See `Picker`."""
        self._router(ticket).finished(
            ticket // len(self.all), cached_tokens, prompt_tokens, output_tokens, ok
        )

    def replicas(self) -> Sequence[Replica]:
        """See `Picker`."""
        return [replica for each in self.all for replica in each.router.replicas()]

    def _router(self, ticket: int) -> Router:
        return self.all[ticket % len(self.all)].router
