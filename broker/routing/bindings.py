"""Binds connections to senders by key, and checks every message against that. Pure."""

from __future__ import annotations

from broker.wire.identity import ANY, AllowList, KeyRole
from broker.wire.messages import Join, Message, Probe, Reason, joining


class Bindings:
    """The allow list in force; None as long as there has been none: then a sender's name is believed."""

    def __init__(self) -> None:
        self._allowed: AllowList | None = None

    def replace(self, allowed: AllowList) -> None:
        """Takes a new list; it holds from the next message on."""
        self._allowed = allowed

    def refusal(self, key: str, sender: str, message: Message) -> tuple[Reason, str] | None:
        """Says why a message may not come under this key; None if it may."""
        if self._allowed is None:
            return None
        identity = self._allowed.get(key)
        if identity is None:
            return Reason.WRONG_KEY, "the key of this connection is not on the allow list, or not any more"
        if isinstance(message, Probe) and sender.startswith(joining("")):
            return None  # whoever may connect may measure
        if not identity.may_speak_as(sender):
            return Reason.WRONG_KEY, f"the key of this connection is that of {identity}, which is not {sender}"
        if isinstance(message, Join) and not identity.may_be(message.island_id):
            asked = message.island_id or "an id of the run's choice"
            return Reason.WRONG_KEY, f"it asks for {asked}, and its key is that of {identity}: ask for that id"
        return None

    def blamed(self, key: str, claimed: str) -> str:
        """Returns whom a message that is refused is laid to: the claimed sender, unless the key shows another."""
        if self._allowed is None:
            return claimed
        identity = self._allowed.get(key)
        if identity is None:
            return ""
        one = identity.role is KeyRole.ISLAND and identity.name != ANY
        return claimed if identity.may_speak_as(claimed) and not one else identity.name

    def anyone_may_be(self, sender: str) -> bool:
        """Whether there is a key that is good for ``sender``."""
        return self._allowed is None or any(each.may_speak_as(sender) for each in self._allowed.values())
