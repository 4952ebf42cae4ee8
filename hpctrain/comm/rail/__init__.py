"""Communication between nodes: rings, trees and recursive halving."""
