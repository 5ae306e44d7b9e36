"""A small classifier of images, by the name that commands and files give it: ``islands.images:task``."""

from islands.tasks.images import task as task
