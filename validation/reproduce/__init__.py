"""Papers' evaluations run again, claim by claim; a folder a paper."""
