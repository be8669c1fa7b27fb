"""The protocol of a link: state machines without I/O."""
