"""The worker's adapter manager: so far the policies that choose what leaves a full tier."""
