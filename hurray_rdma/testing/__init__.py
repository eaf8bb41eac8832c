"""What tests of this engine, and of programs that use it, need: real second processes, and joined state machines."""
