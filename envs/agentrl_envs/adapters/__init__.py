"""Environments of other libraries as agentrl's, one file each; a library is imported when its adapter is made."""
