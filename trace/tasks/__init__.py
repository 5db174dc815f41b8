"""What the policy is asked: problem generators, verifiers, and the sandbox that runs what it wrote."""
