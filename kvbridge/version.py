"""The release of kvbridge."""

VERSION = "0.1.0"
