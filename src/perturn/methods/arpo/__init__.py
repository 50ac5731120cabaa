"""ARPO: branches where the policy is uncertain, and advantages of the turns that episodes share."""
