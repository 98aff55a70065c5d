"""The members of a group: how they find each other, their addresses, and events when they join or leave."""
