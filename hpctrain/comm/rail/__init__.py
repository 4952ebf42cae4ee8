"""Between nodes: rings, trees and halving over the slow link."""
