"""The guards of the invariants of reference.md, section 10: each with the tests that notice when it is gone."""

from tests.mutants.guards_of_progress import PROGRESS
from tests.mutants.guards_of_versions import VERSIONS

MUTANTS = (*VERSIONS, *PROGRESS)
