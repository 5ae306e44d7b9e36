"""Reads what a run reports of itself: the one place where tests look into the state of an aggregator's core."""


class Reading:
    """What one core reports; :class:`tests.aggregator_hand.Desk` is one, too."""

    def __init__(self, core):
        self.core = core

    @property
    def phase(self):
        return self.core.run.phase

    @property
    def epoch(self):
        return self.core.run.epoch

    @property
    def settings(self):
        """In force, with the recipe as it has been settled."""
        return self.core.run.config

    @property
    def manifest(self):
        return self.core.run.model.manifest

    @property
    def versions(self):
        """The newest published version of each fragment; -1 for none."""
        return self.core.run.versions

    @property
    def members(self):
        """Id -> row, of every island that ever joined."""
        return {member.island_id: member for member in self.core.run.fleet.members}

    @property
    def live(self):
        """Ids of the islands that live, in order."""
        return [member.island_id for member in self.core.run.fleet.members.live(self.core.run.now_s)]

    @property
    def open_rounds(self):
        """Round id -> fragment, of the rounds that wait for answers."""
        return {each.round_id: each.fragment_id for each in self.core.run.schedule.open_rounds.values()}

    def rounds_of(self, fragment):
        """Ids of the open rounds of one fragment."""
        return [round_id for round_id, p in self.open_rounds.items() if p == fragment]

    @property
    def troubles(self):
        """Sentences that say what is wrong now, the oldest first."""
        return self.core.run.troubles.sentences(self.core.run.now_s)

    @property
    def behind(self):
        """Whether the store is behind what peers hold."""
        return any(": behind: " in each for each in self.troubles)

    @property
    def refusals(self):
        """Reason -> messages refused in this life of the aggregator."""
        return self.core.run.fleet.refusals

    @property
    def waiting_bytes(self):
        """Bytes of the contributions that wait in rounds, or are held."""
        return self.core.run.model.waiting_bytes()

    @property
    def quarantined(self):
        """Ids of the islands that are kept out, in order."""
        return list(self.core.run.fleet.quarantine.now(self.core.run.now_s))

    @property
    def participation(self):
        """How many islands took part in the versions so far."""
        return self.core.run.books.ledger.participation()

    def contributions(self, fragment=0):
        """What is in the newest version of a fragment."""
        return self.core.run.model.fragments[fragment].contributions

    def blocks(self, island_id):
        """The blocks of data that an island is told."""
        return self.core.run.books.data.told(island_id)

    def tokens(self, island_id=None):
        """Tokens trained, merged, wasted by cause and in flight, of one island or of all."""
        return self.core.run.books.ledger.books(island_id).tokens()

    def check_books(self):
        """Fails if the books contain more than was trained, or do not balance."""
        self.core.run.books.ledger.check()
        assert self.core.run.books.ledger.books().balanced()
