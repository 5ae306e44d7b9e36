"""The default task, by the name that commands and files give it: ``islands.language:task``."""

from islands.tasks.language import task as task
